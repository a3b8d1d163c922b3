//! The results of a run: a table, and the plot of its curves.

use examples::parameters::Parameters;
use examples::plot;
use examples::text::{bytes, count, table, thousands};

use crate::cli::Args;
use crate::error::Error;
use crate::train::Outcome;

/// Draws the curves and prints the table. Only rank 0 does so.
pub(crate) fn finish(args: &Args, outcome: &Outcome) -> Result<(), Error> {
    let Some(metrics) = &outcome.metrics else {
        return Ok(());
    };
    let ranks = count(outcome.ranks, "rank");
    let mut title = format!(
        "ResNet-{}, width {}, {}, {ranks}: {}",
        args.depth, args.width, args.precision, outcome.data
    );
    if let Some(dir) = &args.data {
        title += &format!(" in {}", dir.display());
    }
    plot::curves(metrics.rows(), &title, &args.out.join("curves.png"))?;
    if !args.quiet {
        println!();
    }
    print!("{}", table(&rows(args, outcome, &ranks)));
    Ok(())
}

fn rows(args: &Args, outcome: &Outcome, ranks: &str) -> Vec<(&'static str, String)> {
    let held_out = &outcome.held_out;
    let parameters = Parameters::of(&outcome.model);
    vec![
        (
            "Held-out accuracy",
            format!(
                "{:.2} % ({} of {} images)",
                100.0 * held_out.accuracy(),
                held_out.right,
                held_out.images
            ),
        ),
        ("Wall time", format!("{:.1} s", outcome.wall.as_secs_f64())),
        (
            "Training",
            format!("{:.0} images/s, {ranks}", outcome.images_per_second),
        ),
        ("All-reduced", bytes(outcome.bytes_reduced)),
        ("Ops on rank 0", outcome.ops.clone()),
        (
            "Parameters",
            format!(
                "{}, checksum {:08x}",
                thousands(parameters.count as u64),
                parameters.checksum
            ),
        ),
        (
            "Written",
            format!(
                "metrics.csv and curves.png in {}, checkpoints in {}",
                args.out.display(),
                args.checkpoint_dir().display()
            ),
        ),
    ]
}
