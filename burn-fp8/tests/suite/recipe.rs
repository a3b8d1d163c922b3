//! Recipes: delayed scaling compared with a brute-force version of Transformer Engine's update.

use burn::config::Config;
use burn::tensor::{Tensor, TensorData};
use burn_fp8::recipe::{
    AmaxCompute, BlockScaling, CurrentScaling, DelayedScaling, Fp8Recipe, LinearCasts,
    RecipeFormat, RowwiseScaling, ScaleUpdate,
};
use burn_fp8::{Fp8Error, Fp8Format, Fp8LinearConfig, Granularity};

use super::device::{Random, compiles_for_long, devices, values};

/// Computes the history without keeping one: it is the last `length` amaxes of the steps that ran.
struct BruteForce {
    length: usize,
    margin: i32,
    algorithm: AmaxCompute,
    max: f32,
    seen: Vec<f32>,
    scale: f32,
}

impl BruteForce {
    fn step(&mut self, amax: f32) {
        if amax == 0.0 {
            return;
        }
        self.seen.push(amax);
        let window = self.seen.len().saturating_sub(self.length);
        let window = match self.algorithm {
            AmaxCompute::Max => &self.seen[window..],
            AmaxCompute::MostRecent => &self.seen[self.seen.len() - 1..],
        };
        // Transformer Engine takes the maximum by CUDA's fmaxf, which ignores NaN if the other operand is a number.
        let numbers = window.iter().copied().filter(|amax| !amax.is_nan());
        let Some(amax) = numbers.max_by(f32::total_cmp) else {
            return;
        };
        if amax.is_infinite() {
            return;
        }
        let scale = self.max * 2f32.powi(-self.margin) / amax;
        self.scale = if scale.is_infinite() { f32::MAX } else { scale };
    }

    /// Slot 0 is free, then the last `length - 1` amaxes from the oldest to the newest.
    fn history(&self) -> Vec<f32> {
        let kept = self.length - 1;
        let padded: Vec<f32> = [0.0]
            .into_iter()
            .cycle()
            .take(kept)
            .chain(self.seen.clone())
            .collect();
        [0.0]
            .into_iter()
            .chain(padded[padded.len() - kept..].iter().copied())
            .collect()
    }
}

#[track_caller]
fn assert_same(actual: &[f32], expected: &[f32]) {
    assert_eq!(actual.len(), expected.len());
    for (actual, expected) in actual.iter().zip(expected) {
        assert!(
            actual.to_bits() == expected.to_bits() || actual.is_nan() && expected.is_nan(),
            "{actual:e} is not {expected:e}"
        );
    }
}

#[test]
fn updates_equal_transformer_engines() {
    for device in devices() {
        let lengths = [(1, 8), (2, 12), (3, 24), (31, 70), (1024, 12)];
        for (number, (length, steps)) in lengths.into_iter().enumerate() {
            for algorithm in [AmaxCompute::Max, AmaxCompute::MostRecent] {
                let margins = [
                    (0, Fp8Format::E4M3),
                    (2, Fp8Format::E5M2),
                    (-3, Fp8Format::E4M3),
                ];
                // Where every step is a launch and two reads, the margins alternate between the lengths. Length 3 gets all of
                // them.
                let all = !compiles_for_long(&device) || length == 3;
                let margins = margins.into_iter().enumerate();
                let margins = margins.filter(|(index, _)| all || *index == number % 3);
                for (_, (margin, format)) in margins {
                    let recipe = DelayedScaling::new()
                        .with_amax_history_len(length)
                        .with_margin(margin)
                        .with_amax_compute(algorithm);
                    let mut reference = BruteForce {
                        length,
                        margin,
                        algorithm,
                        max: format.max(),
                        seen: vec![],
                        scale: 1.0,
                    };
                    let mut random = Random::new(length as u64);
                    let mut history = Tensor::<1>::zeros([length], &device);
                    let mut scale = Tensor::<1>::ones([1], &device);
                    for step in 0..steps {
                        // Zero: not used in this step. Tiny: the scale overflows, by the amax alone or with the margin.
                        let amax = match random.bits() % 12 {
                            0 => 0.0,
                            1 => f32::from_bits(3),
                            2 => 1e-36,
                            3 if step > steps / 2 => f32::INFINITY,
                            4 | 5 if step > steps / 3 => f32::NAN,
                            _ => random.normal().abs() * 10.0,
                        };
                        let staged = Tensor::from_data(TensorData::from([amax]), &device);
                        (history, scale) = recipe.update(format).apply(history, scale, staged);
                        reference.step(amax);
                        assert_same(&values(history.clone()), &reference.history());
                        assert_same(&values(scale.clone()), &[reference.scale]);
                    }
                }
            }
        }
    }
}

#[test]
fn scale_of_special_amaxes() {
    // The cases of Transformer Engine's test_scale_update_numeric_scenarios, starting with a scale of 2.
    for device in devices() {
        for (amax, expected) in [
            (0.0, 2.0),
            (f32::from_bits(1), f32::MAX),
            (4.0, 112.0),
            (f32::INFINITY, 2.0),
            (f32::NAN, 2.0),
        ] {
            let update = DelayedScaling::new().update(Fp8Format::E4M3);
            let tensor = |value: f32| Tensor::<1>::from_floats([value], &device);
            let (history, scale) = update.apply(tensor(0.0), tensor(2.0), tensor(amax));
            assert_same(&values(scale), &[expected]);
            assert_same(&values(history), &[0.0]);
        }
    }
}

/// Windows that contain NaN, and the effect of the margin.
#[test]
fn scales_of_windows_and_margins() {
    use AmaxCompute::{Max, MostRecent};
    for device in devices() {
        for (algorithm, margin, amaxes, expected) in [
            (Max, 0, vec![3.0, f32::NAN, 5.0], 448.0 / 5.0),
            (Max, 0, vec![5.0, f32::NAN], 448.0 / 5.0),
            (Max, 0, vec![f32::NAN, f32::NAN], 1.0),
            // The infinity leaves a window of three with the third amax after it.
            (Max, 0, vec![7.0, f32::INFINITY, 3.0, 2.0], 64.0),
            (Max, 0, vec![7.0, f32::INFINITY, 3.0, 2.0, 1.0], 448.0 / 3.0),
            (MostRecent, 0, vec![3.0, f32::NAN], 448.0 / 3.0),
            (MostRecent, 0, vec![3.0, f32::NAN, 5.0], 448.0 / 5.0),
            (Max, 2, vec![7.0], 16.0),
            (Max, -2, vec![7.0], 256.0),
            // 448 / 1e-36 is above the largest f32, but a quarter of it is not.
            (Max, 2, vec![1e-36], 112.0 / 1e-36),
            (Max, 0, vec![1e-36], f32::MAX),
            (Max, -64, vec![1e-20], f32::MAX),
        ] {
            let recipe = DelayedScaling::new()
                .with_margin(margin)
                .with_amax_compute(algorithm);
            let tensor = |values: &[f32]| Tensor::<1>::from_data(TensorData::from(values), &device);
            let (mut history, mut scale) = (tensor(&[0.0; 3]), tensor(&[1.0]));
            for &amax in &amaxes {
                let update = recipe.update(Fp8Format::E4M3);
                (history, scale) = update.apply(history, scale, tensor(&[amax]));
            }
            assert_eq!(
                values(scale),
                [expected],
                "{algorithm:?} {margin} {amaxes:?}"
            );
        }
    }
}

#[test]
fn updates_are_plain_data() {
    let update = ScaleUpdate {
        fp8_max: 448.0,
        margin: 3,
        algorithm: AmaxCompute::MostRecent,
    };
    let recipe = DelayedScaling::new()
        .with_margin(3)
        .with_amax_compute(AmaxCompute::MostRecent);
    assert_eq!(recipe.update(Fp8Format::E4M3), update);
}

#[test]
fn recipes_make_the_round_trip_through_json() {
    let delayed = DelayedScaling::new()
        .with_margin(2)
        .with_format(RecipeFormat::E4M3)
        .with_amax_history_len(31)
        .with_amax_compute(AmaxCompute::MostRecent)
        .with_interval(4);
    for recipe in [
        Fp8Recipe::from(delayed),
        CurrentScaling::new().with_power_of_two(true).into(),
        RowwiseScaling::new().with_power_of_two(false).into(),
        BlockScaling::new().with_size(64).into(),
        Fp8Recipe::default(),
    ] {
        let json = serde_json::to_string(&recipe).unwrap();
        assert_eq!(serde_json::from_str::<Fp8Recipe>(&json).unwrap(), recipe);
        assert_eq!(Fp8Recipe::load_binary(json.as_bytes()).unwrap(), recipe);
    }
}

/// torchao rounds the scales of rows, and Transformer Engine those of blocks. Scales of whole tensors are rounded only on
/// request.
#[test]
fn powers_of_two_are_the_peers_defaults() {
    for (recipe, power_of_two) in [
        (Fp8Recipe::from(DelayedScaling::new()), false),
        (CurrentScaling::new().into(), false),
        (RowwiseScaling::new().into(), true),
        (BlockScaling::new().into(), true),
        (CurrentScaling::new().with_power_of_two(true).into(), true),
    ] {
        assert_eq!(recipe.power_of_two(), power_of_two, "{recipe:?}");
    }
    assert_eq!(Fp8Recipe::default().casts(), LinearCasts::TENSOR);
    let blocks = BlockScaling::new();
    assert_eq!(Fp8Recipe::from(blocks).casts(), blocks.casts());
}

#[test]
fn formats_of_recipes() {
    use Fp8Format::{E4M3, E5M2};
    assert_eq!(Fp8Recipe::default().format(), RecipeFormat::Hybrid);
    for (format, forward, gradient) in [
        (RecipeFormat::Hybrid, E4M3, E5M2),
        (RecipeFormat::E4M3, E4M3, E4M3),
    ] {
        assert_eq!((format.forward(), format.gradient()), (forward, gradient));
        assert_eq!(
            Fp8Recipe::from(CurrentScaling::new().with_format(format)).validate(),
            Ok(())
        );
    }
}

#[test]
fn bad_recipes_are_errors() {
    let pure = Err(Fp8Error::ForwardFormat {
        format: Fp8Format::E5M2,
    });
    let e5m2 = RecipeFormat::E5M2;
    assert_eq!(
        Fp8Recipe::from(DelayedScaling::new().with_format(e5m2)).validate(),
        pure
    );
    assert_eq!(
        Fp8Recipe::from(CurrentScaling::new().with_format(e5m2)).validate(),
        pure
    );
    assert_eq!(
        Fp8Recipe::from(RowwiseScaling::new().with_format(e5m2)).validate(),
        pure
    );
    assert_eq!(
        Fp8Recipe::from(BlockScaling::new().with_format(e5m2)).validate(),
        pure
    );
    for (recipe, field) in [
        (
            DelayedScaling::new().with_amax_history_len(0),
            "amax_history_len",
        ),
        (DelayedScaling::new().with_interval(0), "interval"),
        (DelayedScaling::new().with_margin(1000), "margin"),
    ] {
        let recipe = Fp8Recipe::from(recipe);
        match recipe.validate() {
            Err(Fp8Error::RecipeField { field: named, .. }) => assert_eq!(named, field),
            other => panic!("{field}: {other:?}"),
        }
        let config = Fp8LinearConfig::new(2, 2).with_recipe(recipe);
        assert!(config.try_init(&devices()[0]).is_err());
    }
}

#[test]
fn scales_do_not_change_along_a_rows_sum() {
    // With operands transposed as each product transposes them, left sides have scales per row and right sides per column, so no
    // scale changes along a sum.
    let LinearCasts {
        output,
        input_gradient: [gradient, weight],
        weight_gradient: [input, other],
    } = RowwiseScaling::new().casts();
    let turned = |granularity| match granularity {
        Granularity::Row => Granularity::Column,
        Granularity::Column => Granularity::Row,
        other => other,
    };
    for product in [output, [gradient, turned(weight)], [turned(input), other]] {
        assert_eq!(product, [Granularity::Row, Granularity::Column]);
    }
    let empty = Fp8Recipe::from(BlockScaling::new().with_size(0)).validate();
    assert_eq!(
        empty,
        Err(Fp8Error::EmptyBlock {
            rows: 0,
            columns: 0
        })
    );
    let square = Granularity::Block {
        rows: 128,
        columns: 128,
    };
    assert_eq!(BlockScaling::new().casts().output[1], square);
}
