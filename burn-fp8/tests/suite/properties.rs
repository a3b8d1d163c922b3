//! Properties of casts and products for any input.

use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use burn_fp8::{Fp8Format, Fp8Tensor, scaled_matmul};
use proptest::prelude::*;

use super::device::values;

fn format() -> impl Strategy<Value = Fp8Format> {
    prop_oneof![Just(Fp8Format::E4M3), Just(Fp8Format::E5M2)]
}

proptest! {
    #[test]
    fn casts_keep_order_and_sign(format in format(), a in any::<f32>(), b in any::<f32>()) {
        let [x, y] = [a, b].map(|value| format.decode(format.encode(value)));
        prop_assert_eq!(x.is_sign_negative(), a.is_sign_negative());
        if a <= b {
            prop_assert!(x <= y, "{} <= {} but {} > {}", a, b, x, y);
        }
        prop_assert_eq!(format.encode(-a), format.encode(a) ^ 0x80);
    }

    #[test]
    fn the_error_is_half_a_last_place(format in format(), value in any::<f32>()) {
        let clamped = value.clamp(-format.max(), format.max());
        let cast = format.decode(format.encode(value));
        let bound = (clamped.abs() * format.epsilon() / 2.0).max(format.min_subnormal() / 2.0);
        prop_assert!((cast - clamped).abs() <= bound, "{} became {}", value, cast);
        // A value of the format stays as it is.
        prop_assert_eq!(format.encode(cast), format.encode(value));
    }

    #[test]
    fn reshaping_a_batch_does_not_change_its_products(
        m in 1usize..6, k in 1usize..9, n in 1usize..6, seed in any::<u64>(),
    ) {
        let device = Device::flex();
        let mut random = super::device::Random::new(seed);
        let mut tensor = |shape: [usize; 3]| {
            let count = shape.iter().product();
            let data = TensorData::new(random.normals(count), shape);
            Fp8Tensor::quantize(Tensor::<3>::from_data(data, &device), Fp8Format::E4M3)
        };
        let (lhs, rhs) = (tensor([2, m, k]), tensor([1, k, n]));
        let batched = scaled_matmul(&lhs, &rhs, None, FloatDType::F32).unwrap();
        let flat = scaled_matmul(
            &lhs.reshape([2 * m, k]), &rhs.reshape([k, n]), None, FloatDType::F32,
        ).unwrap();
        for (a, b) in values(batched).into_iter().zip(values(flat)) {
            prop_assert!((a - b).abs() <= 1e-5 * (1.0 + a.abs()));
        }
    }
}
