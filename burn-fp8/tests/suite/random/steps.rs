//! [`Step`]s of a layer, as data.

use burn::tensor::FloatDType;
use burn_fp8::Microbatch;
use burn_fp8::recipe::{
    AmaxCompute, BlockScaling, CurrentScaling, DelayedScaling, Fp8Recipe, RecipeFormat,
    RowwiseScaling,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::dtypes;
use super::model::Mode;
use super::tensors::{Numbers, View, views};

#[derive(Clone, Debug)]
pub(super) enum Step {
    Pass(Pass),
    /// The scaling state is read.
    Look,
    /// The layer is saved and loaded.
    Record,
    /// The parameters change.
    Optimize,
    /// A clone stays, and the layer itself trains no more of it.
    Clone,
    /// The layer becomes a linear layer and fp8 again.
    Convert,
    /// It moves to the next device.
    Move,
    /// It has another recipe from now on.
    Recipe(Fp8Recipe),
    /// Its amaxes are shared by a call for the whole model.
    Share,
}

#[derive(Clone, Debug)]
pub(super) struct Pass {
    pub(super) mode: Mode,
    /// The recipe of the scope that it runs in, if it has one.
    pub(super) recipe: Option<Fp8Recipe>,
    /// The scope around that scope.
    pub(super) around: (bool, Option<Fp8Recipe>),
    /// The shape of the input without its last dimension.
    pub(super) batch: Vec<usize>,
    pub(super) view: View,
    pub(super) numbers: Numbers,
    pub(super) dtype: FloatDType,
    pub(super) seed: u64,
    /// Whether the input has a gradient.
    pub(super) tracked: bool,
    pub(super) backward: Backward,
}

/// When the backward pass is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Backward {
    Never,
    AtOnce,
    /// After the next pass, and its backward.
    Later,
}

#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) recipe: Fp8Recipe,
    pub(super) sizes: [usize; 2],
    pub(super) bias: bool,
    /// Whether the weight has no gradient.
    pub(super) frozen: bool,
    /// How many ranks share their amaxes.
    pub(super) ranks: usize,
    pub(super) steps: Vec<Step>,
}

fn recipes() -> impl Strategy<Value = Fp8Recipe> {
    let format = || select(vec![RecipeFormat::Hybrid, RecipeFormat::E4M3]);
    let amaxes = select(vec![AmaxCompute::Max, AmaxCompute::MostRecent]);
    let delayed = (1usize..5, 1usize..4, -2i32..3, format(), amaxes);
    let delayed = delayed.prop_map(|(length, interval, margin, format, amaxes)| {
        Fp8Recipe::from(
            DelayedScaling::new()
                .with_amax_history_len(length)
                .with_interval(interval)
                .with_margin(margin)
                .with_format(format)
                .with_amax_compute(amaxes),
        )
    });
    let others = (
        0..3,
        format(),
        any::<bool>(),
        select(vec![1usize, 3, 8, 16, 128]),
    );
    let others = others.prop_map(|(which, format, power_of_two, size)| match which {
        0 => Fp8Recipe::from(
            CurrentScaling::new()
                .with_format(format)
                .with_power_of_two(power_of_two),
        ),
        1 => RowwiseScaling::new()
            .with_format(format)
            .with_power_of_two(power_of_two)
            .into(),
        _ => BlockScaling::new()
            .with_size(size)
            .with_format(format)
            .with_power_of_two(power_of_two)
            .into(),
    });
    prop_oneof![delayed, others]
}

fn passes() -> impl Strategy<Value = Pass> {
    let modes = prop_oneof![
        3 => Just(Mode::Train(Microbatch::Only)),
        2 => Just(Mode::Train(Microbatch::First)),
        3 => Just(Mode::Train(Microbatch::Later)),
        2 => Just(Mode::Evaluate),
        1 => Just(Mode::Off),
        1 => Just(Mode::Calibrate),
    ];
    let batch = vec(prop_oneof![1 => Just(0usize), 20 => 1usize..7], 0..=3);
    let numbers = prop_oneof![
        8 => Just(Numbers::Normal),
        2 => Just(Numbers::Sparse),
        1 => Just(Numbers::Zeros),
        1 => Just(Numbers::Spread),
        1 => Just(Numbers::Tiny),
        1 => Just(Numbers::Broken),
    ];
    let backward = prop_oneof![
        1 => Just(Backward::Never),
        4 => Just(Backward::AtOnce),
        1 => Just(Backward::Later),
    ];
    let flags = (any::<bool>(), backward);
    let scope = || prop_oneof![2 => Just(None), 1 => recipes().prop_map(Some)];
    let scopes = (scope(), (any::<bool>(), scope()));
    (
        (modes, scopes),
        batch,
        views(),
        numbers,
        dtypes(),
        any::<u64>(),
        flags,
    )
        .prop_map(
            |((mode, (recipe, around)), batch, view, numbers, dtype, seed, (tracked, backward))| {
                Pass {
                    mode,
                    recipe,
                    around,
                    batch,
                    view,
                    numbers,
                    dtype,
                    seed,
                    tracked,
                    backward,
                }
            },
        )
}

pub(super) fn cases() -> impl Strategy<Value = Case> {
    let step = prop_oneof![
        12 => passes().prop_map(Step::Pass),
        1 => Just(Step::Look),
        1 => Just(Step::Record),
        1 => Just(Step::Optimize),
        1 => Just(Step::Clone),
        1 => Just(Step::Convert),
        1 => Just(Step::Move),
        1 => recipes().prop_map(Step::Recipe),
        1 => Just(Step::Share),
    ];
    let size = || prop_oneof![1 => Just(0usize), 2 => Just(1), 20 => 2usize..20, 3 => 30usize..36];
    let frozen = prop_oneof![4 => Just(false), 1 => Just(true)];
    (
        recipes(),
        [size(), size()],
        any::<bool>(),
        frozen,
        1usize..4,
        vec(step, 1..12),
    )
        .prop_map(|(recipe, sizes, bias, frozen, ranks, steps)| Case {
            recipe,
            sizes,
            bias,
            frozen,
            ranks,
            steps,
        })
}
