//! Measures which routine is the fastest, once for each size of product.

use burn_cubecl::{CubeTuneId, tensor::CubeTensor};
use cubecl::tune::{LocalTuner, Tunable, TunableSet, TuneGroup, local_tuner};

use super::{Key, MatmulRoutine, Product, buffer};

/// Multiplications above which the direct routine is not worth a measurement.
const DIRECT: usize = 1 << 24;

/// The product of that key, by the routine that was the fastest for its size.
pub(super) fn matmul(key: Key, product: Product) -> CubeTensor {
    static TUNER: LocalTuner<Key, CubeTuneId> = local_tuner!();

    let client = product.lhs.client.clone();
    let id = CubeTuneId::new(&client, &product.lhs.device);
    let on = product.lhs.clone();
    let routines = TUNER.init(&id, move || {
        let native = native(&on);
        let one = TuneGroup::new("routines", |_: &Key| 0);
        let inputs = |_: &Key, keyed: &Keyed| keyed.measured();
        let mut set = TunableSet::new(|keyed: &Keyed| keyed.key.clone(), inputs);
        for routine in MatmulRoutine::ALL {
            let native = native.clone();
            let run = move |keyed: Keyed| Ok::<_, String>(routine.matmul(keyed.product));
            let tunable = Tunable::new(&routine.to_string(), run);
            set = set.with(tunable.group(&one, move |key| rank(routine, key, &native)));
        }
        set
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

fn native(on: &CubeTensor) -> Vec<MatmulRoutine> {
    let mut native = MatmulRoutine::ALL.to_vec();
    native.retain(|routine| routine.is_native(on));
    native
}

/// When a routine is measured for the products of a key, by what is native to the device: in the first round, in the next, should
/// all of the first fail, or, below 0, never.
///
/// Where fp8 is multiplied as it is, decoding it first does not pay, and to measure it is to measure all of Burn's products.
fn rank(routine: MatmulRoutine, key: &Key, native: &[MatmulRoutine]) -> i8 {
    let suits = |routine: MatmulRoutine| suits(routine, key) && native.contains(&routine);
    let accelerated = |&routine: &MatmulRoutine| routine.reads_along_sums() && suits(routine);
    match routine {
        _ if !suits(routine) => -1,
        MatmulRoutine::Decoded if native.iter().any(accelerated) => 0,
        _ => 1,
    }
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

    /// What is measured first where such routines are native.
    fn first(key: &Key, native: &[MatmulRoutine]) -> Vec<MatmulRoutine> {
        let mut first = MatmulRoutine::ALL.to_vec();
        first.retain(|routine| rank(*routine, key, native) == 1);
        first
    }

    fn competing(product: &Product) -> Vec<MatmulRoutine> {
        first(&key(product), &native(&product.lhs))
    }

    /// Else the tuner could run a routine on a product that declines it, and panic.
    #[test]
    fn products_of_one_key_have_the_same_routines() {
        // Less than 2^24 multiplications, and more: by the key that is no product for the direct routine.
        let (first, second) = (sized(304, 208, 208), sized(512, 256, 256));
        assert_eq!(key(&first), key(&second));
        assert_ne!(key(&sized(4, 0, 4)), key(&sized(4, 1, 4)));
        let mut fast = sized(304, 208, 208);
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

    /// A product is decoded where nothing multiplies it as it is, and where all that would have failed.
    #[test]
    fn decoding_is_for_where_there_is_nothing_better() {
        use MatmulRoutine::{CublasLt, Decoded, Direct, Wgmma, WgmmaTma};
        let hopper = [Direct, Decoded, Wgmma, WgmmaTma, CublasLt];
        let large = key(&sized(4096, 4096, 4096));
        assert_eq!(first(&large, &hopper), [Wgmma, WgmmaTma]);
        assert_eq!(rank(Decoded, &large, &hopper), 0);
        assert_eq!(rank(Direct, &large, &hopper), -1);
        let small = key(&sized(256, 256, 256));
        assert_eq!(first(&small, &hopper), [Direct, Wgmma, WgmmaTma]);
        // Scales that change within a step of the tensor cores.
        let fine = Granularity::Block {
            rows: 1,
            columns: 32,
        };
        let blocks = Key {
            granularities: [fine, Granularity::Column],
            ..large
        };
        assert_eq!(first(&blocks, &hopper), [Decoded]);
    }
}
