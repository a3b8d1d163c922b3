//! Casts are bit-exact with torch and ml_dtypes, on the host, on every device, and in the portable ops.

use burn::tensor::{DType, Device, Element, Tensor, TensorData};
use burn_fp8::{Fp8Data, Fp8Format, Fp8Tensor, Granularity, amax};

use super::device::{Random, devices, float_dtypes, values};
use super::fixtures;

fn codes_of<T: Element>(inputs: &[T], dtype: DType, format: Fp8Format, device: &Device) -> Vec<u8> {
    let data = TensorData::new(inputs.to_vec(), [inputs.len()]);
    let tensor = Tensor::<1>::from_data(data, (device, dtype));
    Fp8Tensor::quantize_with_scale(tensor, 1.0, format)
        .unwrap()
        .into_data()
        .codes
}

#[test]
fn host_casts_match_the_fixtures() {
    for format in Fp8Format::ALL {
        let (inputs, expected) = fixtures::from_bf16(format);
        let codes: Vec<_> = inputs.iter().map(|&x| format.encode_bf16(x)).collect();
        fixtures::assert_codes(format, &inputs, &codes, &expected);
        let (inputs, expected) = fixtures::from_f16(format);
        let codes: Vec<_> = inputs.iter().map(|&x| format.encode_f16(x)).collect();
        fixtures::assert_codes(format, &inputs, &codes, &expected);
        let (inputs, expected) = fixtures::from_f32(format);
        let codes: Vec<_> = inputs.iter().map(|&x| format.encode(x)).collect();
        fixtures::assert_codes(format, &inputs, &codes, &expected);
    }
}

#[test]
fn host_values_match_the_fixtures() {
    for format in Fp8Format::ALL {
        for (code, expected) in fixtures::values(format).into_iter().enumerate() {
            let value = format.decode(code as u8);
            assert_eq!(value.is_nan(), expected.is_nan(), "{format:?} {code:#x}");
            if !value.is_nan() {
                assert_eq!(value.to_bits(), expected.to_bits(), "{format:?} {code:#x}");
            }
        }
    }
}

#[test]
fn constants_match_the_values() {
    for format in Fp8Format::ALL {
        let finite: Vec<f32> = fixtures::values(format)
            .into_iter()
            .filter(|x| x.is_finite())
            .collect();
        let positive = |min: f32, x: &f32| if *x > 0.0 { min.min(*x) } else { min };
        assert_eq!(format.max(), finite.iter().copied().fold(0.0, f32::max));
        assert_eq!(
            format.min_subnormal(),
            finite.iter().fold(f32::MAX, positive)
        );
        assert_eq!(format.decode(format.max_code()), format.max());
        assert!(format.decode(format.nan_code()).is_nan());
        let above_one = finite
            .iter()
            .copied()
            .filter(|&x| x > 1.0)
            .fold(f32::MAX, f32::min);
        assert_eq!(format.epsilon(), above_one - 1.0);
        // At the smallest normal the spacing starts to grow: twice that value is one binade higher.
        let smallest = 1u8 << format.mantissa_bits();
        assert_eq!(format.min_positive(), format.decode(smallest));
        assert_eq!(
            format.bias() as i32,
            1 - format.min_positive().log2() as i32
        );
    }
}

/// Finds the nearest of a format's values among all of them. The values come from the fixtures, and the points halfway between
/// them are exact in f64.
struct Nearest {
    format: Fp8Format,
    halfway: Vec<f64>,
}

impl Nearest {
    fn new(format: Fp8Format) -> Self {
        let values = &fixtures::values(format)[..=format.max_code() as usize];
        let halfway = |pair: &[f32]| (f64::from(pair[0]) + f64::from(pair[1])) / 2.0;
        Self {
            format,
            halfway: values.windows(2).map(halfway).collect(),
        }
    }

    /// The code of the nearest value. Ties go to the even code, and values beyond the largest saturate.
    fn code(&self, value: f32) -> u8 {
        let magnitude = f64::from(value.abs());
        let below = self.halfway.partition_point(|&point| point < magnitude);
        let tie = self.halfway.get(below) == Some(&magnitude);
        let code = below + usize::from(tie && below % 2 == 1);
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        match value.is_nan() {
            true => self.format.nan_code() | sign,
            false => code as u8 | sign,
        }
    }
}

/// Ten million floats: half with arbitrary bits, half in the range of the format's values.
#[test]
fn random_floats_round_to_the_nearest_value() {
    const CHUNK: usize = 1 << 20;
    for format in Fp8Format::ALL {
        let nearest = Nearest::new(format);
        let mut random = Random::new(1);
        // From below half the smallest value to above the largest.
        let exponents = 2 * format.bias() + format.mantissa_bits() + 3;
        let lowest = 127 - format.bias() - format.mantissa_bits() - 1;
        for _ in 0..10_000_000usize.div_ceil(CHUNK) {
            let inputs: Vec<f32> = (0..CHUNK)
                .map(|index| {
                    let bits = random.bits();
                    let exponent = lowest + (bits >> 32) as u32 % exponents;
                    f32::from_bits(match index % 2 {
                        0 => bits as u32,
                        _ => bits as u32 & 0x807F_FFFF | exponent << 23,
                    })
                })
                .collect();
            let expected: Vec<_> = inputs.iter().map(|&x| nearest.code(x)).collect();
            let host: Vec<_> = inputs.iter().map(|&x| format.encode(x)).collect();
            fixtures::assert_codes(format, &inputs, &host, &expected);
            for device in devices() {
                let codes = codes_of(&inputs, DType::F32, format, &device);
                fixtures::assert_codes(format, &inputs, &codes, &expected);
            }
        }
    }
}

#[test]
fn device_casts_match_the_fixtures() {
    for device in devices() {
        for format in Fp8Format::ALL {
            if device.supports_dtype(DType::BF16) {
                let (inputs, expected) = fixtures::from_bf16(format);
                let codes = codes_of(&inputs, DType::BF16, format, &device);
                fixtures::assert_codes(format, &inputs, &codes, &expected);
            }
            let (inputs, expected) = fixtures::from_f16(format);
            let codes = codes_of(&inputs, DType::F16, format, &device);
            fixtures::assert_codes(format, &inputs, &codes, &expected);
            let (inputs, expected) = fixtures::from_f32(format);
            let codes = codes_of(&inputs, DType::F32, format, &device);
            fixtures::assert_codes(format, &inputs, &codes, &expected);
        }
    }
}

#[test]
fn device_values_match_the_fixtures() {
    for device in devices() {
        for format in Fp8Format::ALL {
            let data = Fp8Data {
                codes: (0..=255).collect(),
                shape: vec![16, 16],
                scales: vec![1.0],
                scale_shape: vec![1, 1],
                granularity: Granularity::Tensor,
                format,
            };
            let tensor = Fp8Tensor::<2>::from_data(data, &device).unwrap();
            for dtype in float_dtypes(&device) {
                let decoded = tensor.dequantize(dtype);
                assert_eq!(decoded.dtype(), DType::from(dtype));
                for (value, expected) in values(decoded).into_iter().zip(fixtures::values(format)) {
                    assert!(
                        value.to_bits() == expected.to_bits()
                            || value.is_nan() && expected.is_nan(),
                        "{value:e} is not {expected:e} in {format:?} by {dtype:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn amax_is_the_largest_magnitude() {
    for device in devices() {
        let amax_of = |values: Vec<f32>| {
            let length = values.len();
            let data = TensorData::new(values, [length]);
            values_of(amax(Tensor::<1>::from_data(data, &device)))
        };
        let mut random = Random::new(2);
        for length in [1, 3, 5, 64, 1000, 40_000] {
            let inputs = random.normals(length);
            let expected = inputs.iter().fold(0.0f32, |max, x| max.max(x.abs()));
            assert_eq!(amax_of(inputs), expected);
        }
        assert_eq!(amax_of(vec![-0.0, 0.0]), 0.0);
        assert_eq!(amax_of(vec![1.0, f32::NEG_INFINITY, 2.0]), f32::INFINITY);
        assert!(amax_of(vec![1.0, f32::NAN, f32::INFINITY]).is_nan());
        assert_eq!(amax_of(vec![1e-45]), 1e-45);
        let empty = Tensor::<2>::zeros([0, 4], &device);
        assert_eq!(values_of(amax(empty)), 0.0);
    }
}

fn values_of(tensor: Tensor<1>) -> f32 {
    values(tensor)[0]
}
