//! Where the tensors of a convolution are: [`Operands`].

use cubecl::{client::Client, server::Handle};

#[cfg(any(all(test, feature = "cpu"), feature = "cuda"))]
use crate::{ALIGNMENT, Convolution, ConvolutionError};

/// The memory of a convolution.
pub struct Operands<'a> {
    /// The client of the device, on whose stream of the output the convolution is computed.
    pub client: &'a Client,
    /// The tensors that are read, in the order of [`shapes`](crate::Convolution::shapes).
    pub inputs: [Handle; 2],
    /// The tensor that is computed.
    pub output: Handle,
}

#[cfg(any(all(test, feature = "cpu"), feature = "cuda"))]
impl Operands<'_> {
    /// Whether the tensors are where they may be.
    pub(crate) fn check(&self, convolution: &Convolution) -> Result<(), ConvolutionError> {
        convolution.check()?;
        let handles = self.inputs.iter().chain([&self.output]);
        for (handle, shape) in handles.zip(convolution.shapes()) {
            let needed = shape.iter().product::<usize>() * convolution.element.size();
            let (needed, size) = (needed as u64, handle.size_in_used());
            if needed > size {
                return Err(ConvolutionError::TooLarge { needed, size });
            }
            // Allocations are aligned to more than this.
            let start = handle.offset_start.unwrap_or(0);
            if !start.is_multiple_of(ALIGNMENT) {
                return Err(ConvolutionError::Unaligned);
            }
        }
        Ok(())
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;
    use crate::{Element, Wanted};
    use burn_cubecl::CubeDevice;
    use cubecl::cpu::CpuDevice;

    #[test]
    fn tensors_are_within_their_memory_and_aligned() {
        let client = CubeDevice::Cpu(CpuDevice).client();
        let mut convolution = Convolution::new(Element::BF16, &[2, 8, 6, 5], &[4, 8, 3, 2]);
        for wanted in Wanted::ALL {
            convolution.wanted = wanted;
            let sizes = convolution
                .shapes()
                .map(|shape| 2 * shape.iter().product::<usize>());
            let check = |sizes: [usize; 3], starts: [u64; 3]| {
                let mut at = 0;
                let [x, w, output] = sizes.map(|size| {
                    at += 1;
                    client.empty(size).offset_start(starts[at - 1])
                });
                let (client, inputs) = (&client, [x, w]);
                let operands = Operands {
                    client,
                    inputs,
                    output,
                };
                operands.check(&convolution)
            };
            assert_eq!(check(sizes, [0; 3]), Ok(()));
            for side in 0..3 {
                let (mut smaller, mut larger, mut starts) = (sizes, sizes, [0; 3]);
                smaller[side] -= 2;
                let [needed, size] = [sizes[side], smaller[side]].map(|size| size as u64);
                let too_large = ConvolutionError::TooLarge { needed, size };
                assert_eq!(check(smaller, [0; 3]), Err(too_large));
                larger[side] += 16;
                starts[side] = 8;
                assert_eq!(check(larger, starts), Err(ConvolutionError::Unaligned));
                starts[side] = 16;
                assert_eq!(check(larger, starts), Ok(()));
            }
        }
    }
}
