//! Random products by every routine.

use burn::tensor::FloatDType;
use burn_fp8::kernels::MatmulRoutine;
use burn_fp8::{Fp8Format, Granularity};
use proptest::prelude::*;
use proptest::sample::select;

use super::super::super::{gpu::Gpu, random};
use super::super::{
    case::{Case, check},
    side::Codes,
};

/// About as long as tiles, their halves and the instructions' parts of them are, or short.
fn side() -> impl Strategy<Value = usize> {
    let near = vec![63usize, 64, 65, 127, 128, 129, 130, 255, 256, 257];
    prop_oneof![1 => Just(1usize), 4 => 2usize..12, 4 => select(near), 2 => 12usize..260]
}

/// About as long as chunks and steps are, or more steps than are in flight.
fn terms() -> impl Strategy<Value = usize> {
    let near = vec![15usize, 16, 17, 127, 128, 129, 255, 256, 257, 384];
    prop_oneof![3 => 1usize..40, 5 => select(near), 2 => 40usize..900]
}

/// Scales of rows and of terms that share one.
fn granularity() -> impl Strategy<Value = Granularity> {
    let rows = select(vec![1usize, 2, 3, 7, 16, 64, 100, 128, 256, 384, 1000]);
    let terms = select(vec![128usize, 256, 384, 1024]);
    prop_oneof![
        2 => Just(Granularity::Tensor),
        1 => Just(Granularity::Row),
        3 => (rows, terms).prop_map(|(rows, columns)| Granularity::Block { rows, columns }),
    ]
}

fn codes() -> impl Strategy<Value = Codes> {
    prop_oneof![3 => Just(Codes::Small), 2 => Just(Codes::Finite), 1 => Just(Codes::Any)]
}

fn cases() -> impl Strategy<Value = Case> {
    let size = (1usize..4, side(), side(), terms())
        // The machine takes about a second for so many.
        .prop_filter("too large", |(batch, m, n, k)| batch * m * n * k < 1 << 23);
    cases_of(size)
}

fn cases_of(
    size: impl Strategy<Value = (usize, usize, usize, usize)>,
) -> impl Strategy<Value = Case> {
    let formats = || select(Fp8Format::ALL.to_vec());
    let dtypes = || select(vec![FloatDType::F32, FloatDType::BF16, FloatDType::F16]);
    (
        ([formats(), formats()], [codes(), codes()]),
        dtypes(),
        (size, 0..3usize),
        [granularity(), granularity()],
        proptest::option::of(dtypes()),
        any::<(bool, [bool; 2])>(),
    )
        .prop_map(
            |((formats, codes), output, (size, one), granularities, bias, (amax, inner))| {
                let (batch, m, n, k) = size;
                let [left, right] = granularities;
                Case {
                    formats,
                    codes,
                    output,
                    size: [batch, m, n, k],
                    // One of the two may be broadcast.
                    batches: [0, 1].map(|side| if side == one { 1 } else { batch }),
                    granularities: [left, right.transposed()],
                    bias,
                    amax,
                    inner,
                }
            },
        )
}

fn run(gpu: Gpu, routine: MatmulRoutine, cases: impl Strategy<Value = Case>) {
    if gpu.client().is_none() {
        return;
    }
    random::check(3, cases, |case| {
        check(gpu, routine, case);
        Ok(())
    });
}

#[test]
fn random_products_by_mma() {
    run(Gpu::Ada, MatmulRoutine::Mma, cases());
}

#[test]
fn random_products_by_wgmma() {
    run(Gpu::Hopper, MatmulRoutine::Wgmma, cases());
}

#[test]
fn random_products_by_tma() {
    run(Gpu::Hopper, MatmulRoutine::WgmmaTma, cases());
}

/// Those that have more than 128 rows, and one scale for 128 columns if scales change along the sum.
fn tall(cases: impl Strategy<Value = Case>) -> impl Strategy<Value = Case> {
    cases.prop_filter("not for tall tiles", |case| {
        let [_, m, _, k] = case.size;
        let [left, right] = case.granularities;
        let shared = match right {
            Granularity::Block { columns, .. } => columns.is_multiple_of(128),
            right => right == Granularity::Tensor,
        };
        // At least 128 terms share a scale.
        let block = |side| matches!(side, Granularity::Block { .. });
        let change = k > 128 && (block(left) || block(right));
        m > 128 && (shared || !change)
    })
}

#[test]
fn random_products_in_tall_tiles() {
    run(Gpu::Hopper, MatmulRoutine::WgmmaTma256, tall(cases()));
}

/// Which have more than 128 columns too.
#[test]
fn random_products_in_clusters() {
    let sides = || select(vec![129usize, 130, 200, 255, 256, 257, 300, 385]);
    let size = (1usize..4, sides(), sides(), terms())
        .prop_filter("too large", |(batch, m, n, k)| batch * m * n * k < 1 << 25);
    run(
        Gpu::Hopper,
        MatmulRoutine::WgmmaTmaMulticast,
        tall(cases_of(size)),
    );
}

#[test]
fn random_products_by_the_direct_routine() {
    run(Gpu::Ada, MatmulRoutine::Direct, cases());
}
