//! Measures which routine is the fastest, once for each size of product.

use std::fmt;

use burn::tensor::DType;
use burn_cubecl::{CubeTuneId, tensor::CubeTensor};
use cubecl::tune::{AutotuneKey, LocalTuner, Tunable, TunableSet, local_tuner};
use serde::{Deserialize, Serialize};

use super::{MatmulRoutine, Product};
use crate::Fp8Format;

/// Multiplications above which the direct routine is not worth a measurement.
const DIRECT: usize = 1 << 24;

/// What products have in common that one measurement is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Key {
    /// Rows, columns, inner dimension and matrices, each rounded up to a power of two.
    size: [usize; 4],
    formats: [Fp8Format; 2],
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
        let shape = product.shape();
        let rank = shape.num_dims();
        let batches = shape.iter().take(rank - 2).product();
        Self {
            size: [shape[rank - 2], shape[rank - 1], product.inner(), batches]
                .map(usize::next_power_of_two),
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

fn competes(id: MatmulRoutine, product: &Product) -> bool {
    let routine = id.routine();
    routine.fits(product)
        && routine.is_native(&product.lhs.client)
        && (id != MatmulRoutine::Direct || product.size() <= DIRECT)
}
