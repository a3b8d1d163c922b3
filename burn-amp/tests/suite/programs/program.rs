//! [`Program`]: a random program on tensors, as data.

use super::{
    ops::{Kind, Op, all},
    precision::Precision,
};
use burn::tensor::FloatDType;
use core::fmt;
use proptest::{collection::vec, prelude::*, sample::select};

/// A program that trains on some tensors: in each iteration it runs its steps, goes backward, and updates its parameters.
#[derive(Clone)]
pub(super) struct Program {
    pub(super) kind: Kind,
    /// The shapes of the data that each iteration begins with, and whether gradients of them are asked for.
    pub(super) inputs: Vec<(Vec<usize>, bool)>,
    pub(super) steps: Vec<Step>,
    /// The region that all steps run in, but not the backward pass after them.
    pub(super) within: Region,
    pub(super) iterations: usize,
    pub(super) update: Update,
    pub(super) loss: Loss,
    /// Whether Burn's autodiff computes activations again.
    pub(super) checkpointing: bool,
}

impl Program {
    /// The program without some steps.
    pub(super) fn without(&self, goes: impl Fn(&Step) -> bool) -> Self {
        let steps = self.steps.iter().filter(|step| !goes(step));
        Self {
            steps: steps.cloned().collect(),
            ..self.clone()
        }
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            inputs,
            iterations,
            update,
            loss,
            checkpointing,
            ..
        } = self;
        writeln!(
            f,
            "{iterations} of {update:?}, {loss:?}, checkpointing: {checkpointing}"
        )?;
        writeln!(f, "inputs {inputs:?}")?;
        self.steps
            .iter()
            .try_for_each(|step| writeln!(f, "{step:?}"))
    }
}

/// A step of a program. Numbers pick among what there is, modulo how much there is.
#[derive(Clone, Debug)]
pub(super) enum Step {
    Op(Op, Vec<u8>),
    /// The next so many steps run in a region.
    Region(Region, usize),
    /// The next so many steps run on a thread of their own.
    Thread(usize),
    /// The next so many steps run on tensors without autodiff, and what they make is read and dropped.
    Inference(usize),
    /// The next so many steps run on tensors of another dtype.
    InDtype(FloatDType, usize),
    /// A tensor is read.
    Read(u8),
    /// Several are read at once.
    ReadAll,
    /// A tensor is dropped.
    Drop(u8),
    /// A tensor is held until the iteration is over.
    Hold(u8),
    /// A backward pass from what there is. Its gradients are added to those of the iteration, and what there was is dropped.
    Backward(Loss),
    Sync,
}

/// A precision that a part of a program asks for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Region {
    Full,
    O0,
    Bf16,
    Fp16,
    /// No other precision, but a scope all the same.
    Named,
}

/// What an iteration minimizes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Loss {
    Sum,
    Mean,
    Squares,
    Weighted,
    /// Of one tensor, without a reduction if it has one element.
    Last,
}

/// How parameters are updated.
#[derive(Clone, Copy, Debug)]
pub(super) enum Update {
    Sgd,
    Momentum,
    WeightDecay,
    Adam,
    None,
}

/// What programs are made of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    pub(super) kind: Kind,
    pub(super) sizes: Sizes,
    /// The devices that programs run on.
    pub(super) precisions: &'static [Precision],
    /// The regions that programs enter.
    pub(super) regions: &'static [Region],
    pub(super) checkpointing: bool,
}

/// How large the data is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Sizes {
    Small,
    /// Large enough for results to be computed again instead of being kept.
    Large,
    /// Some of it has no elements.
    Empty,
}

pub(super) const EVERY_REGION: &[Region] = &[
    Region::Full,
    Region::O0,
    Region::Bf16,
    Region::Fp16,
    Region::Named,
];

/// Programs of that form.
pub(super) fn programs(form: Form) -> impl Strategy<Value = Program> {
    let iterations = prop_oneof![3 => Just(1usize), 2 => Just(2), 1 => Just(3)];
    (
        vec((shape(form.sizes), any::<bool>()), 1..4),
        vec(step(form), 1..24),
        iterations,
        update(),
        loss(),
        any::<bool>().prop_map(move |on| on && form.checkpointing),
    )
        .prop_map(
            move |(inputs, steps, iterations, update, loss, checkpointing)| Program {
                inputs,
                steps,
                within: Region::Named,
                iterations,
                update,
                loss,
                checkpointing,
                kind: form.kind,
            },
        )
}

fn shape(sizes: Sizes) -> BoxedStrategy<Vec<usize>> {
    let small = vec(
        prop_oneof![Just(2usize), Just(1), Just(3), Just(4), Just(6)],
        1..=4,
    );
    let large: Vec<Vec<usize>> = LARGE.iter().map(|dims| dims.to_vec()).collect();
    match sizes {
        Sizes::Small => small.boxed(),
        Sizes::Empty => vec(
            prop_oneof![2 => Just(0usize), 2 => Just(1), 3 => 2usize..4],
            1..=4,
        )
        .boxed(),
        Sizes::Large => prop_oneof![5 => select(large), 1 => small].boxed(),
    }
}

/// Shapes of at least 4096 elements, and rows and columns of some of them.
const LARGE: &[&[usize]] = &[
    &[64, 64],
    &[4, 32, 32],
    &[2, 4, 32, 32],
    &[8, 8, 8, 8],
    &[2, 64, 64],
    &[128, 32],
    &[64, 1],
    &[1, 64],
    &[64],
];

fn step(form: Form) -> impl Strategy<Value = Step> {
    let op = (select(all(form.kind)), vec(any::<u8>(), 8));
    let region = (select(form.regions.to_vec()), 1usize..8);
    let dtypes = vec![FloatDType::F16, FloatDType::BF16, FloatDType::F64];
    let dtype = (select(dtypes), 1usize..6);
    prop_oneof![
        24 => op.prop_map(|(op, picks)| Step::Op(op, picks)),
        2 => region.prop_map(|(region, steps)| Step::Region(region, steps)),
        1 => (1usize..6).prop_map(Step::Thread),
        1 => (1usize..6).prop_map(Step::Inference),
        1 => dtype.prop_map(|(dtype, steps)| Step::InDtype(dtype, steps)),
        1 => any::<u8>().prop_map(Step::Read),
        1 => Just(Step::ReadAll),
        2 => any::<u8>().prop_map(Step::Drop),
        1 => any::<u8>().prop_map(Step::Hold),
        1 => loss().prop_map(Step::Backward),
        1 => Just(Step::Sync),
    ]
}

fn loss() -> impl Strategy<Value = Loss> {
    select(vec![
        Loss::Sum,
        Loss::Weighted,
        Loss::Mean,
        Loss::Squares,
        Loss::Last,
    ])
}

fn update() -> impl Strategy<Value = Update> {
    select(vec![
        Update::Sgd,
        Update::Momentum,
        Update::WeightDecay,
        Update::Adam,
        Update::None,
    ])
}
