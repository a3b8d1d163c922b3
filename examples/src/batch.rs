//! Turns records into tensors: crops and mirrors them at random, normalizes them, and stacks them.
//!
//! The random crop of an image depends on the seed, the epoch and the image alone, so that it is the same on every rank, and in
//! a run that resumes.

use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::images::{CHANNELS, Images, PIXELS, SIDE};

/// The width in pixels of the black border that is added before a random crop (He et al. 2015, section 4.2).
const PADDING: usize = 4;

/// The mean and standard deviation of each channel, for pixels scaled to the range 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Normalization {
    /// The means.
    pub mean: [f32; CHANNELS],
    /// The standard deviations.
    pub std: [f32; CHANNELS],
}

impl Normalization {
    /// Computes the statistics of `images`.
    ///
    /// A constant channel keeps its scale: its standard deviation is set to 1.
    ///
    /// # Panics
    /// If there are no images.
    pub fn of(images: &Images) -> Self {
        assert!(!images.is_empty(), "the statistics of no images");
        let count = (images.len() * SIDE * SIDE) as f64;
        let mut sums = [(0_u64, 0_u64); CHANNELS];
        for index in 0..images.len() {
            for (plane, (sum, squares)) in images.pixels(index).chunks(SIDE * SIDE).zip(&mut sums) {
                for &pixel in plane {
                    *sum += u64::from(pixel);
                    *squares += u64::from(pixel).pow(2);
                }
            }
        }
        let mean = sums.map(|(sum, _)| sum as f64 / count);
        let std: [f64; CHANNELS] = std::array::from_fn(|channel| {
            let mean_square = sums[channel].1 as f64 / count;
            (mean_square - mean[channel].powi(2)).max(0.0).sqrt()
        });
        Self {
            mean: mean.map(|mean| (mean / 255.0) as f32),
            std: std.map(|std| if std > 0.0 { (std / 255.0) as f32 } else { 1.0 }),
        }
    }

    fn apply(&self, channel: usize, pixel: u8) -> f32 {
        (f32::from(pixel) / 255.0 - self.mean[channel]) / self.std[channel]
    }
}

/// Images and their classes on a device.
#[derive(Debug, Clone)]
pub struct Batch {
    /// `[images, CHANNELS, SIDE, SIDE]`, normalized.
    pub images: Tensor<4>,
    /// `[images]`
    pub labels: Tensor<1, Int>,
}

/// Makes batches of images.
///
/// ```
/// use burn::tensor::Device;
/// use examples::{batch::{Batcher, Normalization}, digits};
///
/// let digits = digits::bundled();
/// let batcher = Batcher { normalization: Normalization::of(&digits.train), mirror: digits.mirror, seed: 0 };
/// let batch = batcher.train(&digits.train, &[5, 3], 0, &Device::flex());
/// assert_eq!(batch.images.dims(), [2, 3, 32, 32]);
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Batcher {
    /// Applied to every pixel.
    pub normalization: Normalization,
    /// Whether half of the training images are mirrored.
    pub mirror: bool,
    /// Determines, together with epoch and image, how an image is cropped and mirrored.
    pub seed: u64,
}

/// The part of the padded image to take, and whether to mirror it.
struct View {
    top: usize,
    left: usize,
    mirror: bool,
}

impl Batcher {
    /// The images at `indices`, cropped (and, if [`mirror`](Self::mirror), mirrored) at random for `epoch`.
    ///
    /// # Panics
    /// If there is no such image.
    pub fn train(
        &self,
        images: &Images,
        indices: &[usize],
        epoch: usize,
        device: &Device,
    ) -> Batch {
        self.stack(images, indices, device, |index| self.draw(epoch, index))
    }

    /// The images at `indices`, neither cropped nor mirrored.
    ///
    /// # Panics
    /// If there is no such image.
    pub fn eval(&self, images: &Images, indices: &[usize], device: &Device) -> Batch {
        self.stack(images, indices, device, |_| View {
            top: PADDING,
            left: PADDING,
            mirror: false,
        })
    }

    fn draw(&self, epoch: usize, index: usize) -> View {
        let mut random = ChaCha8Rng::seed_from_u64(self.seed);
        random.set_stream((epoch as u64) << 32 | index as u64);
        View {
            top: random.random_range(0..=2 * PADDING),
            left: random.random_range(0..=2 * PADDING),
            mirror: self.mirror && random.random(),
        }
    }

    fn stack(
        &self,
        images: &Images,
        indices: &[usize],
        device: &Device,
        view: impl Fn(usize) -> View,
    ) -> Batch {
        let mut values = Vec::with_capacity(indices.len() * PIXELS);
        for &index in indices {
            self.append(&mut values, images.pixels(index), &view(index));
        }
        let labels: Vec<i32> = indices
            .iter()
            .map(|&index| i32::from(images.label(index)))
            .collect();
        let shape = [indices.len(), CHANNELS, SIDE, SIDE];
        Batch {
            images: Tensor::from_data(TensorData::new(values, shape), device),
            labels: Tensor::from_data(TensorData::new(labels, [indices.len()]), device),
        }
    }

    /// Appends one normalized image. Pixels of the view that are outside of the image are black.
    fn append(&self, values: &mut Vec<f32>, pixels: &[u8], view: &View) {
        for (channel, plane) in pixels.chunks(SIDE * SIDE).enumerate() {
            for row in 0..SIDE {
                let source_row = (row + view.top)
                    .checked_sub(PADDING)
                    .filter(|&row| row < SIDE);
                for column in 0..SIDE {
                    let column = if view.mirror {
                        SIDE - 1 - column
                    } else {
                        column
                    };
                    let source_column = (column + view.left)
                        .checked_sub(PADDING)
                        .filter(|&column| column < SIDE);
                    let pixel = match (source_row, source_column) {
                        (Some(row), Some(column)) => plane[row * SIDE + column],
                        _ => 0,
                    };
                    values.push(self.normalization.apply(channel, pixel));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::RECORD;

    const IDENTITY: Normalization = Normalization {
        mean: [0.0; 3],
        std: [1.0; 3],
    };

    /// Random images, the same every time.
    fn noise(count: usize) -> Images {
        let mut random = ChaCha8Rng::seed_from_u64(1);
        let mut records: Vec<u8> = (0..count * RECORD)
            .map(|_| random.random_range(1..=255))
            .collect();
        for (label, record) in records.chunks_mut(RECORD).enumerate() {
            record[0] = (label % 10) as u8;
        }
        Images::from_records(records, "noise").unwrap()
    }

    fn values(batch: Batch) -> Vec<f32> {
        batch.images.into_data().try_to_vec().unwrap()
    }

    #[test]
    fn normalized_images_have_mean_zero_and_deviation_one() {
        let images = noise(50);
        let batcher = Batcher {
            normalization: Normalization::of(&images),
            mirror: true,
            seed: 0,
        };
        let all: Vec<usize> = (0..images.len()).collect();
        let batch = batcher.eval(&images, &all, &Device::flex());
        for channel in 0..CHANNELS {
            let values = batch.images.clone().slice([0..50, channel..channel + 1]);
            let mean: f32 = values.clone().mean().into_scalar();
            let square: f32 = (values.clone() * values).mean().into_scalar();
            assert!(
                mean.abs() < 1e-4 && (square - 1.0).abs() < 1e-4,
                "channel {channel}: {mean} {square}"
            );
        }
        let labels: Vec<i64> = batch
            .labels
            .into_data()
            .convert::<i64>()
            .try_to_vec()
            .unwrap();
        assert_eq!(labels[..12], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]);
    }

    #[test]
    fn images_of_one_colour_become_zeros() {
        let images = Images::from_records(vec![7; 2 * RECORD], "grey").unwrap();
        let batcher = Batcher {
            normalization: Normalization::of(&images),
            mirror: false,
            seed: 0,
        };
        assert_eq!(batcher.normalization.std, [1.0; 3]);
        let found = values(batcher.eval(&images, &[0, 1], &Device::flex()));
        assert!(found.iter().all(|value| value.abs() < 1e-6));
    }

    #[test]
    fn a_crop_is_a_window_of_the_padded_image() {
        let images = noise(1);
        let pixel = |channel: usize, row: isize, column: isize| {
            if (0..32).contains(&row) && (0..32).contains(&column) {
                f32::from(images.pixels(0)[channel * 1024 + (row * 32 + column) as usize]) / 255.0
            } else {
                0.0
            }
        };
        let batcher = Batcher {
            normalization: IDENTITY,
            mirror: true,
            seed: 3,
        };
        let mut windows = std::collections::HashSet::new();
        for epoch in 0..400 {
            let found = values(batcher.train(&images, &[0], epoch, &Device::flex()));
            // Tries all possible windows. Noise fits exactly one.
            let fits = (-4..=4_isize)
                .flat_map(|down| {
                    (-4..=4_isize)
                        .flat_map(move |right| [(down, right, false), (down, right, true)])
                })
                .filter(|&(down, right, mirror)| {
                    found.iter().enumerate().all(|(i, &value)| {
                        let (channel, row, column) =
                            (i / 1024, (i / 32 % 32) as isize, (i % 32) as isize);
                        let column = if mirror { 31 - column } else { column };
                        value == pixel(channel, row + down, column + right)
                    })
                })
                .collect::<Vec<_>>();
            assert_eq!(fits.len(), 1, "epoch {epoch}: {fits:?}");
            windows.insert(fits[0]);
        }
        // Of 162 windows, 400 fair draws miss about 14.
        assert!(windows.len() > 130, "{} windows", windows.len());
        assert!(windows.iter().any(|w| w.2) && windows.iter().any(|w| !w.2));
    }

    #[test]
    fn what_is_drawn_depends_on_seed_epoch_and_image_alone() {
        let images = noise(6);
        let device = Device::flex();
        let draw = |seed, epoch, indices: &[usize]| {
            values(
                Batcher {
                    normalization: IDENTITY,
                    mirror: true,
                    seed,
                }
                .train(&images, indices, epoch, &device),
            )
        };
        let together = draw(0, 1, &[4, 2]);
        assert_eq!(together, [draw(0, 1, &[4]), draw(0, 1, &[2])].concat());
        assert_ne!(together, draw(0, 2, &[4, 2]));
        assert_ne!(together, draw(1, 1, &[4, 2]));
    }
}
