//! The ops that programs are made of: a table for each group.

mod elementwise;
mod norms;
mod pairs;
mod places;
mod products;
mod reductions;
mod spatial;

use super::{machine::Machine, picks::Picks, value::Float};
use core::fmt;

/// An op of a program, or a few. It takes operands from the machine, and gives a result, if it is one for these operands.
#[derive(Clone, Copy)]
pub(super) struct Op {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) run: fn(&mut Machine, &mut Picks<'_>) -> Option<Float>,
}

/// Whether results are exact if operands are small integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Exact,
    Rounded,
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// Writes a table of ops: what each does with the machine and its picks.
macro_rules! table {
    ($($kind:ident $name:ident: |$machine:ident, $picks:ident| $run:expr;)*) => {
        &[$($crate::suite::programs::ops::Op {
            name: stringify!($name),
            kind: $crate::suite::programs::ops::Kind::$kind,
            run: |$machine, $picks| $run,
        }),*]
    };
}
use table;

/// Writes a table of ops on one tensor of any rank.
macro_rules! unary {
    ($($kind:ident $name:ident: |$x:ident| $body:expr;)*) => {
        $crate::suite::programs::ops::table! {
            $($kind $name: |m, p| Some($crate::suite::programs::value::each!(m.float(p), |$x| $body));)*
        }
    };
}
use unary;

/// The ops for programs of that kind.
pub(super) fn all(kind: Kind) -> Vec<Op> {
    let tables = [
        elementwise::FUNCTIONS,
        elementwise::ACTIVATIONS,
        elementwise::WITH_NUMBERS,
        elementwise::MASKS,
        elementwise::CASTS,
        norms::NORMS,
        pairs::PAIRS,
        places::SHAPES,
        places::PLACES,
        products::PRODUCTS,
        products::PRODUCTS,
        reductions::REDUCTIONS,
        spatial::CONVOLUTIONS,
        spatial::CONVOLUTIONS,
        spatial::POOLS,
    ];
    let ops = tables.into_iter().flatten().copied();
    ops.filter(|op| kind == Kind::Rounded || op.kind == Kind::Exact)
        .collect()
}
