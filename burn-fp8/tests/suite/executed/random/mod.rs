//! Random cases beside the brute-force version in f64.

mod casts;
mod products;
