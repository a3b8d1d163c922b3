//! Plots the curves of a run as a PNG: the loss above, the held-out accuracy below.

use std::path::{Path, PathBuf};
use std::sync::Once;

use plotters::coord::ranged1d::ValueFormatter;
use plotters::coord::{Shift, types::RangedCoordf64};
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};
use thiserror::Error;

use crate::metrics::Row;

const SIZE: (u32, u32) = (1000, 900);
/// The name under which plotters looks up the font.
const FONT: &str = "sans-serif";
const TRAINING: RGBColor = RGBColor(31, 119, 180);
const HELD_OUT: RGBColor = RGBColor(214, 39, 40);
/// The weight of the past in the smoothed loss.
const SMOOTHING: f64 = 0.8;

/// The plot could not be written.
#[derive(Debug, Error)]
#[error("cannot write {}: {reason}", .path.display())]
pub struct PlotError {
    path: PathBuf,
    reason: String,
}

/// Draws the loss of every step, its moving average, the held-out loss and the held-out accuracy. Losses that
/// are not positive, finite numbers are left out.
///
/// ```
/// use examples::{metrics::Row, plot};
///
/// let dir = tempfile::tempdir()?;
/// let rows: Vec<Row> = (1..=50).map(|step| Row {
///     step, epoch: 1, lr: 0.1, loss: 2.3 / step as f64, images_per_second: 500.0, seconds: 1.0,
///     held_out_loss: None, held_out_accuracy: None,
/// }).collect();
/// plot::curves(&rows, "fifty steps", &dir.path().join("curves.png"))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the file cannot be written.
pub fn curves(rows: &[Row], title: &str, path: &Path) -> Result<(), PlotError> {
    use_bundled_font();
    draw(rows, title, path).map_err(|error| PlotError {
        path: path.to_owned(),
        reason: error.to_string(),
    })
}

type Drawn = Result<(), Box<dyn std::error::Error>>;
type Area<'a> = DrawingArea<BitMapBackend<'a>, Shift>;

/// Registers a bundled font, so that text can be drawn on a machine without fonts.
fn use_bundled_font() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let registered = register_font(FONT, FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT);
        assert!(registered.is_ok(), "the bundled font is a font");
    });
}

fn draw(rows: &[Row], title: &str, path: &Path) -> Drawn {
    let root = BitMapBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let panels = root.titled(title, (FONT, 26))?.split_evenly((2, 1));
    draw_loss(rows, &panels[0])?;
    draw_accuracy(rows, &panels[1])?;
    root.present()?;
    Ok(())
}

fn draw_loss(rows: &[Row], area: &Area) -> Drawn {
    // Values that have no place on the logarithmic axis are left out.
    let on_axis = |point: &(f64, f64)| point.1.is_finite() && point.1 > 0.0;
    let training = rows.iter().map(|row| (row.step as f64, row.loss));
    let training: Vec<_> = training.filter(on_axis).collect();
    let mut held_out = held_out(rows, |row| row.held_out_loss);
    held_out.retain(on_axis);
    let values = || training.iter().chain(&held_out).map(|point| point.1);
    // The range includes 1, with room of a factor of 1.2 on both sides.
    let low = values().fold(f64::INFINITY, f64::min).min(1.0) / 1.2;
    let high = values().fold(0.0, f64::max).max(1.0) * 1.2;
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d(steps(rows), (low..high).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("step")
        .y_desc("loss")
        .x_label_formatter(&|step| format!("{step:.0}"))
        .y_label_formatter(&|loss| format!("{loss}"))
        .label_style((FONT, 15))
        .light_line_style(TRANSPARENT)
        .draw()?;
    chart.draw_series(LineSeries::new(training.clone(), TRAINING.mix(0.3)))?;
    chart
        .draw_series(LineSeries::new(
            smoothed(&training),
            TRAINING.stroke_width(2),
        ))?
        .label("training (faint: each step)")
        .legend(|(x, y)| PathElement::new([(x, y), (x + 20, y)], TRAINING.stroke_width(2)));
    draw_points(&mut chart, &held_out, "held out")?;
    legend(&mut chart, SeriesLabelPosition::UpperRight)
}

fn draw_accuracy(rows: &[Row], area: &Area) -> Drawn {
    let accuracy = held_out(rows, |row| {
        row.held_out_accuracy.map(|accuracy| 100.0 * accuracy)
    });
    let low = accuracy.iter().map(|point| point.1).fold(100.0, f64::min);
    let low = (low / 10.0).floor() * 10.0;
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d(steps(rows), low.min(90.0)..100.0)?;
    chart
        .configure_mesh()
        .x_desc("step")
        .y_desc("held-out accuracy, %")
        .x_label_formatter(&|step| format!("{step:.0}"))
        .y_label_formatter(&|accuracy| format!("{accuracy:.0}"))
        .label_style((FONT, 15))
        .light_line_style(TRANSPARENT)
        .draw()?;
    let best = accuracy.iter().map(|point| point.1).fold(0.0, f64::max);
    draw_points(
        &mut chart,
        &accuracy,
        &format!("held out, best {best:.2} %"),
    )?;
    legend(&mut chart, SeriesLabelPosition::LowerRight)
}

type Chart<'a, Y> = ChartContext<'a, BitMapBackend<'a>, Cartesian2d<RangedCoordf64, Y>>;

fn draw_points<Y: Ranged<ValueType = f64>>(
    chart: &mut Chart<Y>,
    points: &[(f64, f64)],
    label: &str,
) -> Drawn {
    chart
        .draw_series(LineSeries::new(points.to_vec(), HELD_OUT.stroke_width(2)))?
        .label(label)
        .legend(|(x, y)| PathElement::new([(x, y), (x + 20, y)], HELD_OUT.stroke_width(2)));
    chart.draw_series(
        points
            .iter()
            .map(|&point| Circle::new(point, 3, HELD_OUT.filled())),
    )?;
    Ok(())
}

fn legend<Y: Ranged<ValueType = f64> + ValueFormatter<f64>>(
    chart: &mut Chart<Y>,
    place: SeriesLabelPosition,
) -> Drawn {
    chart
        .configure_series_labels()
        .position(place)
        .label_font((FONT, 16))
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    Ok(())
}

fn steps(rows: &[Row]) -> std::ops::Range<f64> {
    let first = rows.first().map_or(0.0, |row| row.step as f64);
    let last = rows.last().map_or(1.0, |row| row.step as f64);
    first..last.max(first + 1.0)
}

fn held_out(rows: &[Row], value: impl Fn(&Row) -> Option<f64>) -> Vec<(f64, f64)> {
    rows.iter()
        .filter_map(|row| Some((row.step as f64, value(row)?)))
        .collect()
}

/// An exponential moving average, without the bias of its start.
fn smoothed(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let (mut sum, mut weight) = (0.0, 0.0);
    points
        .iter()
        .map(|&(step, value)| {
            sum = sum * SMOOTHING + value;
            weight = weight * SMOOTHING + 1.0;
            (step, sum / weight)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(count: usize) -> Vec<Row> {
        (1..=count)
            .map(|step| Row {
                step,
                epoch: 1 + step / 10,
                lr: 0.1,
                loss: 2.3 * (-(step as f64) / 30.0).exp() + 0.01,
                images_per_second: 100.0,
                seconds: step as f64,
                held_out_loss: step.is_multiple_of(10).then_some(1.0 / step as f64),
                held_out_accuracy: step.is_multiple_of(10).then_some(1.0 - 1.0 / step as f64),
            })
            .collect()
    }

    /// Plots the rows, and returns the bytes of the file.
    fn png(rows: &[Row]) -> Vec<u8> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("curves.png");
        curves(rows, "a title", &path).unwrap();
        let bytes = std::fs::read(path).unwrap();
        assert_eq!(&bytes[..8], b"\x89PNG\r\n\x1a\n");
        bytes
    }

    #[test]
    fn curves_are_drawn_into_a_png() {
        let full = png(&rows(100));
        let number = |at: usize| u32::from_be_bytes(full[at..at + 4].try_into().unwrap());
        assert_eq!([number(16), number(20)], [1000, 900]);
        let (full, empty) = (full.len(), png(&[]).len());
        assert!(
            full > empty + 5_000,
            "curves take ink: {full} bytes with, {empty} without"
        );
    }

    #[test]
    fn one_step_is_drawn_too() {
        png(&rows(1));
    }

    #[test]
    fn losses_that_have_no_place_on_the_axis_are_left_out() {
        for loss in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -1.0] {
            let (mut all, mut fewer) = (rows(100), rows(100));
            all[49].held_out_loss = Some(loss);
            fewer[49].held_out_loss = None;
            // The held-out images are not evaluated in these steps.
            for row in &mut all[40..43] {
                row.loss = loss;
            }
            fewer.drain(40..43);
            assert!(png(&all) == png(&fewer), "{loss}");
        }
    }

    #[test]
    fn the_moving_average_of_a_constant_is_the_constant() {
        let points: Vec<_> = (0..20).map(|i| (f64::from(i), 3.0)).collect();
        assert!(
            smoothed(&points)
                .iter()
                .all(|point| (point.1 - 3.0).abs() < 1e-12)
        );
        // The second value is (0.8 * 1 + 2) / 1.8.
        assert!((smoothed(&[(0.0, 1.0), (1.0, 2.0)])[1].1 - 2.8 / 1.8).abs() < 1e-12);
    }

    #[test]
    fn a_folder_that_is_not_there_is_named() {
        let error = curves(&rows(3), "", Path::new("/nowhere/curves.png")).unwrap_err();
        assert!(error.to_string().contains("/nowhere/curves.png"), "{error}");
    }
}
