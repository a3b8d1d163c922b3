//! Against the formulas.

use super::*;
use crate::rowwise::tests::{assert_close, on_devices, tensor};

/// Of channels that are whole loads or not, in tiles that are full or not, of one pixel, fewer than a cube has units, and many.
#[test]
fn kernels_compute_moments_and_sums() {
    for [pixels, channels] in [[1, 16], [7, 3], [37, 24], [600, 8], [300, 140], [70, 300]] {
        // Far from zero, with a first pixel like the others.
        let number = |at: usize| {
            let channel = at % channels;
            (channel * 11 % 7) as f64 * 40.0 + (at * 37 % 23) as f64 / 4.0
        };
        let x: Vec<f64> = (0..pixels * channels).map(number).collect();
        let of_channel = |of: &dyn Fn(f64) -> f64, channel: usize| {
            let all = x.iter().skip(channel).step_by(channels);
            all.map(|&x| of(x)).sum::<f64>() / pixels as f64
        };
        let means: Vec<f64> = (0..channels)
            .map(|channel| of_channel(&|x| x, channel))
            .collect();
        let variance = |channel: usize| of_channel(&|x| (x - means[channel]).powi(2), channel);
        let variances: Vec<f64> = (0..channels).map(variance).collect();
        let other = |at: usize| (at * 29 % 13) as f64 / 8.0 - 0.75;
        let other: Vec<f64> = (0..x.len()).map(other).collect();
        let centers: Vec<f64> = means.iter().map(|mean| mean.round()).collect();
        let (mut sums, mut products) = (vec![0.0; channels], vec![0.0; channels]);
        for (at, (x, other)) in x.iter().zip(&other).enumerate() {
            sums[at % channels] += other;
            products[at % channels] += other * (x - centers[at % channels]);
        }
        on_devices(|device| {
            let on_device = |values: &[f64]| plain(tensor(values, [pixels, channels], device));
            let [mean, variance] = moments(on_device(&x));
            assert_eq!(mean.shape().as_slice(), [1, channels]);
            assert_close(mean, &means);
            assert_close(variance, &variances);
            let centers = tensor(&centers, [1, channels], device);
            let [sum, product] = super::sums([on_device(&other), on_device(&x)], centers);
            assert_close(sum, &sums);
            assert_eq!(product.shape().as_slice(), [1, channels]);
            assert_close(product, &products);
        });
    }
}
