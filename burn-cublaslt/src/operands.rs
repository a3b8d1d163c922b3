//! Where the matrices of a product are: [`Operands`].

use cubecl::{client::Client, server::Handle};

/// The memory of a product.

pub struct Operands<'a> {
    /// The client of the device, on whose stream of the output the product is computed.
    pub client: &'a Client,
    /// The left side.
    pub lhs: Handle,
    /// The right side.
    pub rhs: Handle,
    /// The output.
    pub output: Handle,
    /// The factors of the left and the right side, if the product is scaled.
    pub scales: Option<[Handle; 2]>,
    /// The bias, if the product has one.
    pub bias: Option<Handle>,
    /// In bytes, from where the left side, the right side and the output begin: once for each time that the product is computed.
    pub offsets: Vec<[u64; 3]>,
}
