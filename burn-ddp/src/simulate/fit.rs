//! Fits alpha and beta to measured messages.

use super::Network;

impl Network {
    /// The network that best fits measured messages, given as bytes and seconds. It has the smallest sum of
    /// squares of relative errors, so that short messages, which determine alpha, count as much as long ones, which
    /// determine beta. Neither is ever below 0.
    ///
    /// `None` if the messages have fewer than two different sizes, or if a time is not positive.
    ///
    /// ```
    /// use burn_ddp::simulate::Network;
    ///
    /// let network = Network::fit(&[(1e3, 11e-6), (1e6, 1010e-6)]).unwrap();
    /// assert!((network.latency - 10e-6).abs() < 1e-12);
    /// assert!((network.bandwidth - 1e9).abs() < 1.0);
    /// ```
    pub fn fit(messages: &[(f64, f64)]) -> Option<Self> {
        let (first, _) = messages.first()?;
        let differ = messages.iter().any(|(bytes, _)| bytes != first);
        if !differ || !messages.iter().all(|(_, seconds)| *seconds > 0.0) {
            return None;
        }
        // Sizes are in units of the mean size, so that the equations are well conditioned.
        let unit = messages.iter().map(|(bytes, _)| bytes).sum::<f64>() / messages.len() as f64;
        let [mut n, mut x, mut xx, mut y, mut xy] = [0.0; 5];
        for (bytes, seconds) in messages {
            // Dividing by a message's time makes its error relative.
            let (one, size) = (1.0 / seconds, bytes / unit / seconds);
            n += one * one;
            x += one * size;
            xx += size * size;
            y += one;
            xy += size;
        }
        let determinant = n * xx - x * x;
        let latency = (xx * y - x * xy) / determinant;
        let rate = (n * xy - x * y) / determinant;
        // If the optimum has a negative alpha or beta, the best allowed solution has that value at 0.
        let (latency, rate) = match (latency < 0.0, rate < 0.0) {
            (true, _) => (0.0, xy / xx),
            (_, true) => (y / n, 0.0),
            _ => (latency, rate),
        };
        Some(Self {
            latency,
            bandwidth: unit / rate,
        })
    }
}
