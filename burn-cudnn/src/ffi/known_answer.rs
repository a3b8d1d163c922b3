//! Convolutions whose results are known: a library that computes something else, or nothing, is not used.

use std::ptr;

use cudarc::driver::{
    result::{free_sync, malloc_sync, memcpy_dtoh_sync, memcpy_htod_sync},
    sys::CUdeviceptr,
};
use half::{bf16, f16};

use super::{Library, text};
use crate::{Convolution, Element, Wanted, direct::direct};

/// Computes a small convolution and its gradients in each type, of whole numbers, whose sums both types hold exactly. The device of
/// the library must be the thread's current one.
pub(super) fn known_answers(library: &Library) -> Result<(), String> {
    for element in [Element::BF16, Element::F16] {
        for wanted in Wanted::ALL {
            let convolution = Convolution {
                wanted,
                stride: vec![2, 1],
                padding: vec![(1, 1); 2],
                ..Convolution::new(element, &[2, 8, 5, 4], &[16, 8, 3, 3])
            };
            let wrong = |problem| format!("{wanted:?} in {element:?}: {problem}");
            is_known(library, &convolution).map_err(wrong)?;
        }
    }
    Ok(())
}

fn is_known(library: &Library, convolution: &Convolution) -> Result<(), String> {
    let element = convolution.element;
    let [a, b, count] = convolution
        .shapes()
        .map(|shape| shape.iter().product::<usize>());
    let values = [whole(a, 7), whole(b, 11)];
    let expected = direct(convolution, values.each_ref().map(Vec::as_slice));
    let plan = library.make_plan(convolution)?;
    let [a, b] = values.map(|values| Memory::holding(&bytes(&values, element)));
    let [a, b] = [a?, b?];
    // What is not written is NaN.
    let output = Memory::holding(&vec![u8::MAX; count * element.size()])?;
    let workspace = Memory::holding(&vec![0; plan.workspace.max(1)])?;
    let tensors = [a.0, b.0, output.0];
    // SAFETY: the default stream is one of the current device. There is as much memory as the tensors and the workspace need, until
    // `read` has waited for the stream.
    let done = unsafe { library.execute(&plan, tensors, workspace.0, ptr::null_mut()) };
    let read = output.read(count * element.size());
    done?;
    match values_of(&read?, element) == expected {
        true => Ok(()),
        false => Err("the result is not the known one".into()),
    }
}

/// Whole numbers between -2 and 2.
fn whole(count: usize, step: usize) -> Vec<f32> {
    let number = |at: usize| ((at * step + at / 5) % 5) as f32 - 2.0;
    (0..count).map(number).collect()
}

fn bytes(values: &[f32], element: Element) -> Vec<u8> {
    let bytes = |&value: &f32| match element {
        Element::BF16 => bf16::from_f32(value).to_ne_bytes(),
        Element::F16 => f16::from_f32(value).to_ne_bytes(),
    };
    values.iter().flat_map(bytes).collect()
}

fn values_of(bytes: &[u8], element: Element) -> Vec<f32> {
    let value = |pair: &[u8]| match element {
        Element::BF16 => bf16::from_ne_bytes([pair[0], pair[1]]).to_f32(),
        Element::F16 => f16::from_ne_bytes([pair[0], pair[1]]).to_f32(),
    };
    bytes.chunks_exact(2).map(value).collect()
}

/// Memory of the thread's current device.
struct Memory(CUdeviceptr);

impl Memory {
    fn holding(bytes: &[u8]) -> Result<Self, String> {
        // SAFETY: it allocates memory, or fails.
        let memory = unsafe { malloc_sync(bytes.len()) }
            .map(Self)
            .map_err(text)?;
        // SAFETY: the memory is as large as the bytes.
        unsafe { memcpy_htod_sync(memory.0, bytes) }.map_err(text)?;
        Ok(memory)
    }

    /// The first bytes, after all that the default stream does.
    fn read(&self, count: usize) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; count];
        // SAFETY: the caller asks for no more than there are. The copy is one of the default stream.
        unsafe { memcpy_dtoh_sync(&mut bytes, self.0) }.map_err(text)?;
        Ok(bytes)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was allocated by this, and nothing uses it afterwards. An error cannot be handled here.
        let _ = unsafe { free_sync(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sums of up to 160 products of such numbers are exact in bf16.
    #[test]
    fn known_answers_are_exact() {
        for element in [Element::BF16, Element::F16] {
            let values = whole(1000, 7);
            assert_eq!(values_of(&bytes(&values, element), element), values);
            assert!((-2..=2).all(|value| values.contains(&(value as f32))));
        }
        let convolution = Convolution::new(Element::BF16, &[2, 8, 5, 4], &[16, 8, 3, 3]);
        for wanted in Wanted::ALL {
            let convolution = Convolution {
                wanted,
                ..convolution.clone()
            };
            let [a, b, _] = convolution.shapes().map(|shape| shape.iter().product());
            let sums = direct(&convolution, [&whole(a, 7), &whole(b, 11)]);
            assert!(sums.iter().all(|sum| sum.abs() <= 256.0));
            assert!(sums.iter().any(|sum| *sum != 0.0));
        }
    }
}
