//! Whether two ways of computing a product agree.

use half::{bf16, f16};

use crate::Element;

/// The elements that some bytes hold.
pub(crate) fn values(bytes: &[u8], element: Element) -> Vec<f32> {
    let pairs = || bytes.chunks_exact(2).map(|pair| [pair[0], pair[1]]);
    match element {
        Element::BF16 => pairs()
            .map(|pair| bf16::from_ne_bytes(pair).to_f32())
            .collect(),
        Element::F16 => pairs()
            .map(|pair| f16::from_ne_bytes(pair).to_f32())
            .collect(),
        Element::F32 => {
            let four = |of: &[u8]| f32::from_ne_bytes([of[0], of[1], of[2], of[3]]);
            bytes.chunks_exact(4).map(four).collect()
        }
        // No product is stored in these.
        Element::E4M3 | Element::E5M2 => Vec::new(),
    }
}

/// Whether elements that were computed in two ways are equal but for their rounding, which is that of 16 bits, or of sums of large terms
/// in another order.
pub(crate) fn agree(expected: &[f32], found: &[f32]) -> bool {
    let finite = expected.iter().filter(|value| value.is_finite());
    let largest = finite.fold(0f32, |largest, value| largest.max(value.abs()));
    let near = |(expected, found): (&f32, &f32)| {
        let both_are_none = expected.is_nan() && found.is_nan();
        both_are_none || expected == found || (expected - found).abs() <= largest / 64.0
    };
    expected.len() == found.len() && expected.iter().zip(found).all(near)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_decoded() {
        let expected = [1.0, -2.5, f32::INFINITY];
        let in_bf16: Vec<u8> = expected.map(|x| bf16::from_f32(x).to_ne_bytes()).concat();
        let in_f16: Vec<u8> = expected.map(|x| f16::from_f32(x).to_ne_bytes()).concat();
        assert_eq!(values(&in_bf16, Element::BF16), expected);
        assert_eq!(values(&in_f16, Element::F16), expected);
        let in_f32: Vec<u8> = expected.map(f32::to_ne_bytes).concat();
        assert_eq!(values(&in_f32, Element::F32), expected);
    }

    #[test]
    fn rounding_makes_no_difference_and_anything_else_does() {
        let expected = [100.0, -3.0, f32::NAN, f32::NEG_INFINITY, 0.0];
        assert!(agree(&expected, &expected));
        assert!(agree(
            &expected,
            &[100.5, -3.2, f32::NAN, f32::NEG_INFINITY, 0.3]
        ));
        for at in 0..expected.len() {
            for wrong in [f32::INFINITY, 97.0, -7.0] {
                let mut found = expected;
                found[at] = wrong;
                assert!(!agree(&expected, &found), "{at}: {wrong}");
            }
        }
        // What was not written is NaN.
        assert!(!agree(&[0.0; 2], &[0.0, f32::NAN]));
        assert!(!agree(&[0.0; 2], &[0.0]));
    }
}
