//! Quartiles.

/// Lower quartile, median and upper quartile, with linear interpolation. NaN if there are no values.
///
/// ```
/// assert_eq!(benches::quartiles([5.0, 1.0, 3.0]), [2.0, 3.0, 4.0]);
/// ```
pub fn quartiles(values: impl IntoIterator<Item = f64>) -> [f64; 3] {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_unstable_by(f64::total_cmp);
    let Some(last) = values.len().checked_sub(1) else {
        return [f64::NAN; 3];
    };
    [0.25, 0.5, 0.75].map(|part| {
        let at = part * last as f64;
        let (below, above) = (values[at.floor() as usize], values[at.ceil() as usize]);
        below + (above - below) * at.fract()
    })
}

#[cfg(test)]
mod tests {
    use super::quartiles;

    #[test]
    fn quartiles_interpolate_as_numpy_does() {
        // numpy.percentile([1, 2, 4, 8], [25, 50, 75])
        assert_eq!(quartiles([8.0, 1.0, 4.0, 2.0]), [1.75, 3.0, 5.0]);
        assert!(quartiles([]).iter().all(|value| value.is_nan()));
    }
}
