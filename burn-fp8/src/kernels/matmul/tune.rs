//! Measures which routine is the fastest, once for each size of product.

use burn_cubecl::{CubeTuneId, tensor::CubeTensor};
use cubecl::tune::{LocalTuner, Tunable, TunableSet, TuneGroup, local_tuner};

use super::{Key, MatmulRoutine, Outline, Product, accelerated, buffer, unmeasured};

/// The number of multiplications above which the direct routine is not worth a measurement.
const DIRECT: usize = 1 << 24;

/// The product, by the routine that was the fastest for its key.
pub(super) fn matmul(key: Key, product: Product) -> CubeTensor {
    static TUNER: LocalTuner<Key, CubeTuneId> = local_tuner!();

    let client = product.lhs.client.clone();
    let id = CubeTuneId::new(&client, &product.lhs.device);
    let routines = TUNER.init(&id, || {
        let one = TuneGroup::new("routines", |_: &Key| 0);
        let inputs = |_: &Key, keyed: &Keyed| keyed.measured();
        let mut set = TunableSet::new(|keyed: &Keyed| keyed.key.clone(), inputs);
        for routine in MatmulRoutine::ALL {
            let run = move |keyed: Keyed| {
                let routine = keyed.in_place_of(routine);
                Ok::<_, String>(routine.matmul(keyed.product_for(routine)))
            };
            let tunable = Tunable::new(&routine.to_string(), run);
            set = set.with(tunable.group(&one, move |key| rank(routine, key)));
        }
        set
    });
    TUNER.execute(&id, &client, routines, Keyed::new(key, product))
}

/// A product with its key. The key is computed only once, because cuBLASLt may take fewer products when it is asked again.
#[derive(Clone)]
struct Keyed {
    key: Key,
    product: Product,
    /// The product for routines that are given copies of its codes.
    apart: Vec<(MatmulRoutine, Product)>,
}

impl Keyed {
    fn new(key: Key, product: Product) -> Self {
        Self {
            key,
            product,
            apart: Vec::new(),
        }
    }

    /// The product for a measurement, which writes to an amax of its own.
    ///
    /// For CubeCL (0.11.3), a kernel writes what it loads by the TMA. If that kernel fails, its operands count as lost, and whatever else
    /// reads them fails too. So such routines are measured on copies.
    fn measured(&self) -> Self {
        let mut keyed = self.clone();
        let amax = &mut keyed.product.amax;
        *amax = amax.as_ref().map(buffer::zero_scalar);
        let mut copied = self.key.routines.clone();
        copied.retain(|routine| routine.loads_by_tma());
        let apart = copied.into_iter().map(|routine| {
            let product = Product {
                lhs: buffer::copy_as_it_lies(&self.product.lhs),
                rhs: buffer::copy_as_it_lies(&self.product.rhs),
                ..keyed.product.clone()
            };
            (routine, product)
        });
        keyed.apart = apart.collect();
        keyed
    }

    fn product_for(self, routine: MatmulRoutine) -> Product {
        let mut apart = self.apart.into_iter();
        match apart.find(|(of, _)| *of == routine) {
            Some((_, product)) => product,
            None => self.product,
        }
    }

    /// `routine` if it is among the key's routines, and otherwise the one that decodes. So no stored result can make a device
    /// emulate an instruction.
    fn in_place_of(&self, routine: MatmulRoutine) -> MatmulRoutine {
        match self.key.routines.contains(&routine) {
            true => routine,
            false => unmeasured(&Outline::of(&self.product)),
        }
    }
}

/// Whether there is more than one routine to measure for a key.
pub(super) fn has_choice(key: &Key) -> bool {
    let first = |routine: &MatmulRoutine| rank(*routine, key) == 1;
    MatmulRoutine::ALL
        .iter()
        .filter(|routine| first(routine))
        .count()
        > 1
}

/// When a routine is measured for a key: in the first round (1), in the next if all of the first fail (0), or never (below 0).
///
/// On a device that multiplies fp8 directly, decoding it first does not pay, and measuring that would measure all of Burn's
/// matmul kernels.
fn rank(routine: MatmulRoutine, key: &Key) -> i8 {
    let suits = key.routines.contains(&routine)
        && (routine != MatmulRoutine::Direct || key.size.multiplications() <= DIRECT);
    match routine {
        _ if !suits => -1,
        MatmulRoutine::Decoded if accelerated(&key.routines).is_some() => 0,
        _ => 1,
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use burn::tensor::FloatDType;
    use burn_cubecl::CubeDevice;

    use super::*;
    use crate::{
        Bias, Fp8Format, Granularity, MatmulSpec,
        kernels::{buffer, matmul::native},
    };
    use MatmulRoutine::{
        CublasLt, Decoded, Direct, Mma, Wgmma, WgmmaTma, WgmmaTma256, WgmmaTmaMulticast,
    };

    /// What is native to a Hopper GPU with NVIDIA's library, which is the last.
    const HOPPER: [MatmulRoutine; 7] = [
        Direct,
        Decoded,
        Wgmma,
        WgmmaTma,
        WgmmaTma256,
        WgmmaTmaMulticast,
        CublasLt,
    ];

    fn sized(m: usize, k: usize, n: usize) -> Product {
        let device = CubeDevice::Cpu(Default::default());
        let client = device.client();
        let codes = |shape: [usize; 2]| buffer::empty_codes(&client, &device, shape.into());
        let lhs = codes([m, k]);
        let scale = buffer::zero_scalar(&lhs);
        Product::new(
            [lhs, codes([k, n])],
            [scale.clone(), scale],
            Bias::None,
            MatmulSpec::new(Fp8Format::E4M3, Fp8Format::E4M3, FloatDType::F32),
        )
    }

    fn key(product: &Product) -> Key {
        let outline = Outline::of(product);
        let routines = native(&outline, &product.lhs.client, &product.lhs.device);
        Key::of(product, &outline, routines)
    }

    /// The key of a product on a device to which these routines are native.
    fn key_with(product: &Product, native: &[MatmulRoutine]) -> Key {
        let outline = Outline {
            library: native.contains(&MatmulRoutine::CublasLt),
            ..Outline::of(product)
        };
        let mut routines = native.to_vec();
        routines.retain(|routine| routine.fits(&outline));
        Key::of(product, &outline, routines)
    }

    /// The routines that are measured first.
    fn first(key: &Key) -> Vec<MatmulRoutine> {
        let mut first = MatmulRoutine::ALL.to_vec();
        first.retain(|routine| rank(*routine, key) == 1);
        first
    }

    /// Otherwise the tuner could run a routine on a product that the routine declines, and panic.
    #[test]
    fn products_of_one_key_have_the_same_routines() {
        // Fewer than 2^24 multiplications, and more. By their key, both are too large for the direct routine.
        let (small, large) = (sized(304, 208, 208), sized(512, 256, 256));
        assert_eq!(key(&small), key(&large));
        assert_ne!(key(&sized(4, 0, 4)), key(&sized(4, 1, 4)));
        let mut fast = sized(304, 208, 208);
        fast.spec = fast.spec.with_fast_accumulation(true);
        assert_ne!(key(&fast), key(&small), "another measurement");
        assert!(first(&key(&sized(256, 256, 256))).contains(&Direct));
        assert!(!first(&key(&small)).contains(&Direct));
        // Sizes that round to the same powers of two, of which only one suits a routine: it takes at most 65,535 cubes of 128
        // rows.
        let native = [Direct, Decoded, Mma];
        let [fits, does_not] =
            [8_388_480, 8_388_481].map(|rows| key_with(&sized(rows, 1, 1), &native));
        assert_eq!(fits.size, does_not.size);
        assert_eq!(fits.routines, native);
        assert_eq!(does_not.routines, [Direct, Decoded]);
        // For cuBLASLt, one of these is padded, in a copy.
        let native = [Direct, Decoded, WgmmaTma, CublasLt];
        let weight_gradient = |rows| key_with(&sized(512, rows, 512), &native);
        assert_ne!(weight_gradient(4096), weight_gradient(4090));
        assert_eq!(weight_gradient(4096), weight_gradient(4080));
        // A CPU has neither cuBLASLt nor instructions for fp8, but still a choice for products that are not too large.
        assert!(has_choice(&key(&sized(256, 256, 256))));
        assert!(!has_choice(&key(&small)) && !has_choice(&key(&sized(4, 0, 4))));
        assert_eq!(first(&key(&sized(4096, 4096, 4096))), [Decoded]);
    }

    /// A result is stored under its key. Its reader does not know which routines were native where it was measured.
    #[test]
    fn another_build_or_gpu_measures_for_itself() {
        let product = sized(4096, 4096, 4096);
        let natives: [&[MatmulRoutine]; 5] = [
            // Ada, and Hopper without and with cuBLASLt, by CubeCL's C++ backend; then either by LLVM, which has no such
            // instructions, with and without cuBLASLt.
            &[Direct, Decoded, Mma],
            &HOPPER[..6],
            &HOPPER,
            &[Direct, Decoded, CublasLt],
            &[Direct, Decoded],
        ];
        let keys = natives.map(|native| key_with(&product, native));
        for (index, key) in keys.iter().enumerate() {
            assert!(!keys[..index].contains(key), "{key}");
        }
        let mut other = keys[1].clone();
        other.device = "NVIDIA H200".to_string();
        assert_ne!(other, keys[1], "another GPU of the kind");
    }

    /// Even if such a result were read.
    #[test]
    fn no_result_has_an_instruction_emulated() {
        let in_place_of = |product: &Product, native: &[MatmulRoutine], routine| {
            let key = key_with(product, native);
            Keyed::new(key, product.clone()).in_place_of(routine)
        };
        let large = sized(256, 512, 512);
        let native = [Direct, Decoded, Wgmma];
        for (routine, expected) in [
            (Direct, Direct),
            (Decoded, Decoded),
            (Mma, Decoded),
            (Wgmma, Wgmma),
            (WgmmaTma, Decoded),
            (CublasLt, Decoded),
        ] {
            assert_eq!(in_place_of(&large, &native, routine), expected);
        }
        // This product cannot be decoded.
        assert_eq!(in_place_of(&sized(4, 0, 4), &native, Wgmma), Direct);
    }

    #[test]
    fn a_failed_load_by_the_tma_leaves_the_operands_to_others() {
        let mut product = sized(256, 512, 512);
        product.rhs = buffer::swapped(product.rhs);
        let key = key_with(&product, &HOPPER[..6]);
        let keyed = Keyed::new(key, product.clone());
        let memory = |product: &Product| {
            // Where it lies is not known at once.
            let memory = |codes: &CubeTensor| codes.handle.memory.clone().binding().id();
            [memory(&product.lhs), memory(&product.rhs)]
        };
        let own = memory(&product);
        let measured = keyed.measured();
        let mut seen = vec![own];
        for routine in [WgmmaTma, WgmmaTma256, WgmmaTmaMulticast] {
            let copied = measured.clone().product_for(routine);
            assert_eq!(copied.rhs.meta, product.rhs.meta);
            assert!(!seen.contains(&memory(&copied)), "{routine}");
            seen.push(memory(&copied));
        }
        for routine in [Direct, Decoded, Wgmma] {
            assert_eq!(memory(&measured.clone().product_for(routine)), own);
        }
        // The product itself is computed from its own.
        assert_eq!(memory(&keyed.product_for(WgmmaTma)), own);
    }

    /// A product is decoded if nothing multiplies it directly, or if everything that does has failed.
    #[test]
    fn decoding_is_for_where_there_is_nothing_better() {
        let product = sized(4096, 4096, 4096);
        let large = key_with(&product, &HOPPER);
        assert_eq!(
            first(&large),
            [Wgmma, WgmmaTma, WgmmaTma256, WgmmaTmaMulticast, CublasLt]
        );
        assert_eq!(rank(Decoded, &large), 0);
        assert_eq!(rank(Direct, &large), -1);
        let small = key_with(&sized(128, 256, 256), &HOPPER);
        assert_eq!(first(&small), [Direct, Wgmma, WgmmaTma, CublasLt]);
        // Scales that change within a step of the tensor cores.
        let mut blocks = product;
        blocks.spec.granularities[0] = Granularity::Block {
            rows: 1,
            columns: 32,
        };
        assert_eq!(first(&key_with(&blocks, &HOPPER[..5])), [Decoded]);
    }
}
