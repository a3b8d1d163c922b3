//! Measures which routine is the fastest, once for each size of product.

use burn_cubecl::{CubeTuneId, tensor::CubeTensor};
use cubecl::tune::{LocalTuner, Tunable, TunableSet, local_tuner};

use super::{Key, MatmulRoutine, Product, buffer};

/// Multiplications above which the direct routine is not worth a measurement.
const DIRECT: usize = 1 << 24;

/// The product of that key, by the routine that was the fastest for its size.
pub(super) fn matmul(key: Key, product: Product) -> CubeTensor {
    static TUNER: LocalTuner<Key, CubeTuneId> = local_tuner!();

    let client = product.lhs.client.clone();
    let id = CubeTuneId::new(&client, &product.lhs.device);
    let routines = TUNER.init(&id, || {
        // A routine that declines is left out of the round.
        MatmulRoutine::ALL.into_iter().fold(
            TunableSet::new(
                |keyed: &Keyed| keyed.key.clone(),
                |_: &Key, keyed: &Keyed| keyed.measured(),
            ),
            |set, routine| {
                set.with(Tunable::new(
                    &routine.to_string(),
                    move |Keyed { key, product }| match competes(routine, &key, &product.lhs) {
                        true => Ok(routine.matmul(product)),
                        false => Err("not for this product and device".to_string()),
                    },
                ))
            },
        )
    });
    let key = key.rounded();
    TUNER.execute(&id, &client, routines, Keyed { key, product })
}

/// A product with its key, which is found once: what cuBLASLt takes may be less when it is looked up again.
#[derive(Clone)]
struct Keyed {
    key: Key,
    product: Product,
}

impl Keyed {
    /// For a measurement, which finds an amax of its own.
    fn measured(&self) -> Self {
        let mut keyed = self.clone();
        let amax = &mut keyed.product.amax;
        *amax = amax.as_ref().map(buffer::zero_scalar);
        keyed
    }
}

/// Decided by key and device alone: the tuner runs what was the fastest for one product on all others of the same key.
fn competes(routine: MatmulRoutine, key: &Key, on: &CubeTensor) -> bool {
    suits(routine, key) && routine.is_native(on)
}

fn suits(routine: MatmulRoutine, key: &Key) -> bool {
    routine.fits(key) && (routine != MatmulRoutine::Direct || key.size.multiplications() <= DIRECT)
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use burn::tensor::FloatDType;
    use burn_cubecl::CubeDevice;

    use super::*;
    use crate::{
        Bias, Fp8Format, Granularity, MatmulSpec, kernels::buffer, kernels::matmul::product,
    };

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

    fn key(product: &Product) -> Key {
        Key::of(product).rounded()
    }

    fn competing(product: &Product) -> Vec<MatmulRoutine> {
        let key = key(product);
        let all = MatmulRoutine::ALL.into_iter();
        all.filter(|routine| competes(*routine, &key, &product.lhs))
            .collect()
    }

    /// Else the tuner could run a routine on a product that declines it, and panic.
    #[test]
    fn products_of_one_key_have_the_same_routines() {
        // Less than 2^24 multiplications, and more: by the key that is no product for the direct routine.
        let (first, second) = (sized(300, 200, 200), sized(512, 256, 256));
        assert_eq!(key(&first), key(&second));
        assert_ne!(key(&sized(4, 0, 4)), key(&sized(4, 1, 4)));
        let mut fast = sized(300, 200, 200);
        fast.spec = fast.spec.with_fast_accumulation(true);
        assert_ne!(key(&fast), key(&first), "another measurement");
        assert!(competing(&sized(256, 256, 256)).contains(&MatmulRoutine::Direct));
        assert!(!competing(&first).contains(&MatmulRoutine::Direct));
    }

    /// Sizes that round to the same key differ in it, so products that cuBLASLt takes are measured apart from those that it
    /// does not.
    #[test]
    fn cublaslt_competes_for_what_it_takes() {
        let large = sized(4096, 4096, 4096);
        // No CPU has it, nor instructions for fp8.
        assert_eq!(competing(&large), [MatmulRoutine::Decoded]);
        let without = key(&large);
        let with = Key {
            library: true,
            ..without.clone()
        };
        assert_ne!(with, without);
        let suiting = |key: &Key| MatmulRoutine::ALL.map(|routine| suits(routine, key));
        assert_eq!(suiting(&without), [false, true, true, true, true, false]);
        assert_eq!(suiting(&with), [false, true, true, true, true, true]);
    }
}
