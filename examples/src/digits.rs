//! The images that come with the examples: real handwritten digits, turned into CIFAR-10 records.
//!
//! They are the 1,797 images of `examples/data/optdigits.csv.gz` (UCI "Optical Recognition of Handwritten Digits",
//! E. Alpaydin and C. Kaynak, 1998, CC BY 4.0): 8x8 pixels of 0 to 16.

use std::io::Read;

use flate2::read::GzDecoder;

use crate::images::{CHANNELS, CLASSES, Images, RECORD, SIDE, Split};

/// One line for each image: 64 pixels of 0 to 16, then the label.
static SOURCE: &[u8] = include_bytes!("../data/optdigits.csv.gz");
/// The height and width of the source's images.
const SOURCE_SIDE: usize = 8;
const SOURCE_PIXELS: usize = SOURCE_SIDE * SOURCE_SIDE;
/// The value of a fully inked source pixel.
const SOURCE_MAX: f32 = 16.0;
/// Of each digit, one image out of this many is held out.
const HELD_OUT: usize = 5;

/// The bundled digits in the CIFAR-10 binary layout, every fifth image of each digit held out.
///
/// ```
/// let digits = examples::digits::bundled();
/// assert_eq!(digits.train.len() + digits.test.len(), 1_797);
/// ```
///
/// # Panics
/// If the data compiled into the program is damaged.
pub fn bundled() -> Split {
    let (mut train, mut test) = (Vec::new(), Vec::new());
    let mut seen = [0; CLASSES];
    for (pixels, label) in source() {
        let count = &mut seen[label as usize];
        *count += 1;
        let part = if *count % HELD_OUT == 0 {
            &mut test
        } else {
            &mut train
        };
        append_record(part, &pixels, label);
    }
    let images =
        |records| Images::from_records(records, "optdigits").expect("the records were just made");
    Split {
        name: "optdigits (bundled)".to_owned(),
        train: images(train),
        test: images(test),
        mirror: false,
    }
}

/// The source's images, in the source's order.
fn source() -> Vec<([u8; SOURCE_PIXELS], u8)> {
    let mut text = String::new();
    GzDecoder::new(SOURCE)
        .read_to_string(&mut text)
        .expect("the bundled digits unpack");
    text.lines()
        .map(|line| {
            let values: Vec<u8> = line
                .split(',')
                .map(|v| v.parse().expect("a number of the bundled digits"))
                .collect();
            let (label, pixels) = values.split_last().expect("a line of the bundled digits");
            (pixels.try_into().expect("64 pixels"), *label)
        })
        .collect()
}

/// Appends one CIFAR-10 record: the label, then the enlarged image once for each channel.
fn append_record(records: &mut Vec<u8>, pixels: &[u8; SOURCE_PIXELS], label: u8) {
    records.reserve(RECORD);
    records.push(label);
    let plane = enlarge(pixels);
    for _ in 0..CHANNELS {
        records.extend(&plane);
    }
}

/// Enlarges an image from 8x8 to 32x32 by bilinear interpolation, with pixel centers aligned and edges repeated. Scales values
/// from 0 to 16 to 0 to 255.
fn enlarge(pixels: &[u8; SOURCE_PIXELS]) -> Vec<u8> {
    // The two source rows (or columns) next to a target row (or column), and the weight of the second.
    let neighbours = |target: usize| {
        let centre = (target as f32 + 0.5) * SOURCE_SIDE as f32 / SIDE as f32 - 0.5;
        let centre = centre.clamp(0.0, (SOURCE_SIDE - 1) as f32);
        let first = centre.floor() as usize;
        (
            first,
            (first + 1).min(SOURCE_SIDE - 1),
            centre - first as f32,
        )
    };
    let at = |row: usize, column: usize| f32::from(pixels[row * SOURCE_SIDE + column]);
    let mut plane = Vec::with_capacity(SIDE * SIDE);
    for row in 0..SIDE {
        let (top, bottom, down) = neighbours(row);
        for column in 0..SIDE {
            let (left, right, across) = neighbours(column);
            let above = at(top, left) * (1.0 - across) + at(top, right) * across;
            let below = at(bottom, left) * (1.0 - across) + at(bottom, right) * across;
            let value = above * (1.0 - down) + below * down;
            plane.push((value * 255.0 / SOURCE_MAX).round() as u8);
        }
    }
    plane
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_split_is_a_fifth_of_each_digit() {
        let digits = bundled();
        for class in 0..CLASSES as u8 {
            let count = |images: &Images| {
                (0..images.len())
                    .filter(|&i| images.label(i) == class)
                    .count()
            };
            let (train, test) = (count(&digits.train), count(&digits.test));
            assert_eq!(test, (train + test) / 5, "digit {class}");
        }
        assert_eq!((digits.train.len(), digits.test.len()), (1_442, 355));
    }

    #[test]
    fn the_first_image_is_the_first_line_of_the_source() {
        let digits = bundled();
        let (pixels, label) = source()[0];
        assert_eq!(digits.train.label(0), label);
        let image = digits.train.pixels(0);
        let (red, rest) = image.split_at(SIDE * SIDE);
        let (green, blue) = rest.split_at(SIDE * SIDE);
        assert!(red == green && green == blue, "grey in all channels");
        // The corners of the enlarged image are those of the source.
        let corner = |row: usize, column: usize| {
            (f32::from(pixels[row * 8 + column]) * 255.0 / 16.0).round() as u8
        };
        assert_eq!(
            [red[0], red[31], red[31 * 32], red[1023]],
            [corner(0, 0), corner(0, 7), corner(7, 0), corner(7, 7)]
        );
        // Target pixels are symmetric around a source pixel's center, so the mean is about the same.
        let mean =
            |values: &[u8]| values.iter().map(|&v| f64::from(v)).sum::<f64>() / values.len() as f64;
        assert!(
            (mean(red) - mean(&pixels) * 255.0 / 16.0).abs() < 2.0,
            "enlarging keeps the mean"
        );
    }

    #[test]
    fn enlarging_keeps_constants_and_ramps() {
        assert!(enlarge(&[16; 64]).iter().all(|&v| v == 255));
        let ramp: [u8; 64] = std::array::from_fn(|i| (i % 8 * 2) as u8);
        let plane = enlarge(&ramp);
        // Column c is at (c + 0.5) / 4 - 0.5 in the source, where the value is twice that. All rows are the same.
        for (i, &value) in plane.iter().enumerate() {
            let position = (((i % 32) as f32 + 0.5) / 4.0 - 0.5).clamp(0.0, 7.0);
            assert_eq!(value, (position * 2.0 * 255.0 / 16.0).round() as u8);
        }
    }
}
