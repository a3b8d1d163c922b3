//! Measures which routine is the fastest, once for each size of product.

use std::fmt;

use burn::tensor::DType;
use burn_cubecl::{CubeTuneId, tensor::CubeTensor};
use cubecl::tune::{AutotuneKey, LocalTuner, Tunable, TunableSet, local_tuner};
use serde::{Deserialize, Serialize};

use super::{MatmulRoutine, Product, Size};
use crate::{Fp8Format, Granularity};

/// Multiplications above which the direct routine is not worth a measurement.
const DIRECT: usize = 1 << 24;

/// What products have in common that one measurement is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Key {
    /// Each rounded up to a power of two; 0 stays, for a product of nothing is another matter.
    size: Size,
    formats: [Fp8Format; 2],
    granularities: [Granularity; 2],
    output: DType,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl AutotuneKey for Key {}

impl Key {
    fn of(product: &Product) -> Self {
        let Size { m, n, k, batches } = product.size();
        let rounded = |size: usize| {
            if size == 0 {
                0
            } else {
                size.next_power_of_two()
            }
        };
        Self {
            size: Size {
                m: rounded(m),
                n: rounded(n),
                k: rounded(k),
                batches: rounded(batches),
            },
            granularities: product.granularities(),
            formats: [product.spec.lhs, product.spec.rhs],
            output: DType::from(product.spec.output),
        }
    }
}

/// The product, by the routine that was the fastest for its size.
pub(super) fn matmul(product: Product) -> CubeTensor {
    static TUNER: LocalTuner<Key, CubeTuneId> = local_tuner!();

    let client = product.lhs.client.clone();
    let id = CubeTuneId::new(&client, &product.lhs.device);
    let routines = TUNER.init(&id, || {
        // A routine that declines is left out of the round.
        MatmulRoutine::ALL.into_iter().fold(
            TunableSet::new(Key::of, |_: &Key, product: &Product| product.clone()),
            |set, routine| {
                set.with(Tunable::new(
                    &routine.to_string(),
                    move |product: Product| match competes(routine, &product) {
                        true => Ok(routine.routine().matmul(product)),
                        false => Err("not for this product and device".to_string()),
                    },
                ))
            },
        )
    });
    TUNER.execute(&id, &client, routines, product)
}

/// Decided by the key alone: the tuner runs what was the fastest for one product on all others of the same key.
fn competes(id: MatmulRoutine, product: &Product) -> bool {
    let Key {
        size,
        granularities,
        ..
    } = Key::of(product);
    let routine = id.routine();
    routine.fits(size, granularities)
        && routine.is_native(&product.lhs.client)
        && (id != MatmulRoutine::Direct || size.multiplications() <= DIRECT)
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use burn::tensor::FloatDType;
    use burn_cubecl::CubeDevice;

    use super::*;
    use crate::{Bias, MatmulSpec, kernels::buffer, kernels::matmul::product};

    fn sized(m: usize, k: usize, n: usize) -> Product {
        let device = CubeDevice::Cpu(Default::default());
        let client = device.client();
        let codes = |shape: [usize; 2]| buffer::empty_codes(&client, &device, shape.into());
        let lhs = codes([m, k]);
        let scale = buffer::zero_scalar(&lhs);
        product(
            [lhs, codes([k, n])],
            [scale.clone(), scale],
            Bias::None,
            [Granularity::Tensor; 2],
            MatmulSpec::new(Fp8Format::E4M3, Fp8Format::E4M3, FloatDType::F32),
        )
    }

    /// Else the tuner could run a routine on a product that declines it, and panic.
    #[test]
    fn products_of_one_key_have_the_same_routines() {
        // Less than 2^24 multiplications, and more.
        let (first, second) = (sized(300, 200, 200), sized(512, 256, 256));
        assert_eq!(Key::of(&first), Key::of(&second));
        for routine in MatmulRoutine::ALL {
            assert_eq!(competes(routine, &first), competes(routine, &second));
        }
        assert_ne!(Key::of(&sized(4, 0, 4)), Key::of(&sized(4, 1, 4)));
        assert!(competes(MatmulRoutine::Direct, &sized(256, 256, 256)));
    }
}
