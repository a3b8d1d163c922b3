//! [`Action`]s of a program, as data.

use burn_amp::recipe::{
    AmaxCompute, BlockScaling, CurrentScaling, DelayedScaling, Fp8Recipe, RecipeFormat,
    RowwiseScaling,
};
use proptest::{collection::vec, prelude::*, sample::select};

#[derive(Clone, Debug)]
pub(super) enum Action {
    Forward(Forward),
    /// Backward from the first of the outputs that wait for one, or from all.
    Backward {
        all: bool,
    },
    /// The layer evaluates an input.
    Evaluate(Forward),
    /// Forward and backward in full precision, once nothing waits: a backward has the precision that the weight was last used in.
    FullPrecision(Forward),
    /// The parameters change, once nothing waits.
    Optimize,
    /// The model and its histories are saved, and loaded on another device, once nothing waits.
    Checkpoint,
}

#[derive(Clone, Debug)]
pub(super) struct Forward {
    /// Modulo the number of layers.
    pub(super) layer: usize,
    /// Whether the input is that of the use before, if it fits.
    pub(super) same: bool,
    /// Whether the input has a gradient.
    pub(super) tracked: bool,
    pub(super) rows: usize,
    /// Powers of two, of the input and of the gradient; `None` for zeros.
    pub(super) sizes: [Option<i32>; 2],
    pub(super) seed: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Program {
    pub(super) recipe: Fp8Recipe,
    /// Sizes, and whether the weight is frozen.
    pub(super) layers: Vec<([usize; 2], bool)>,
    /// Whether a reducer doubles amaxes.
    pub(super) reduces: bool,
    pub(super) actions: Vec<Action>,
}

fn recipes() -> impl Strategy<Value = Fp8Recipe> {
    let format = || select(vec![RecipeFormat::Hybrid, RecipeFormat::E4M3]);
    let amaxes = select(vec![AmaxCompute::Max, AmaxCompute::MostRecent]);
    let delayed = (1usize..5, 1usize..4, -2i32..3, format(), amaxes).prop_map(
        |(length, interval, margin, format, amaxes)| {
            let recipe = DelayedScaling::new().with_amax_history_len(length);
            let recipe = recipe.with_interval(interval).with_margin(margin);
            Fp8Recipe::from(recipe.with_format(format).with_amax_compute(amaxes))
        },
    );
    let others = (0..3, format(), any::<bool>()).prop_map(|(which, format, power_of_two)| {
        let current = CurrentScaling::new().with_power_of_two(power_of_two);
        match which {
            0 => Fp8Recipe::from(current.with_format(format)),
            1 => RowwiseScaling::new().with_format(format).into(),
            _ => BlockScaling::new().with_size(16).with_format(format).into(),
        }
    });
    prop_oneof![3 => delayed, 1 => others]
}

fn forwards() -> impl Strategy<Value = Forward> {
    let size = || prop_oneof![1 => Just(None), 9 => (-12i32..13).prop_map(Some)];
    (
        0..6usize,
        any::<bool>(),
        any::<bool>(),
        1usize..6,
        [size(), size()],
        any::<u64>(),
    )
        .prop_map(|(layer, same, tracked, rows, sizes, seed)| Forward {
            layer,
            same,
            tracked,
            rows,
            sizes,
            seed,
        })
}

pub(super) fn programs() -> impl Strategy<Value = Program> {
    let action = prop_oneof![
        8 => forwards().prop_map(Action::Forward),
        6 => any::<bool>().prop_map(|all| Action::Backward { all }),
        2 => forwards().prop_map(Action::Evaluate),
        1 => forwards().prop_map(Action::FullPrecision),
        2 => Just(Action::Optimize),
        2 => Just(Action::Checkpoint),
    ];
    let sizes = select(vec![[16usize, 16], [16, 32], [32, 16]]);
    let layer = (sizes, prop::bool::weighted(0.2));
    (
        recipes(),
        vec(layer, 1..4),
        prop::bool::weighted(0.3),
        vec(action, 1..20),
    )
        .prop_map(|(recipe, layers, reduces, actions)| Program {
            recipe,
            layers,
            reduces,
            actions,
        })
}
