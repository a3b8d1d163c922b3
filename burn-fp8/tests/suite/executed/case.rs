//! One product by one routine, compared with the product by its definition.

use burn::tensor::FloatDType;
use burn_cubecl::CubeBackend;
use burn_fp8::kernels::{MatmulPolicy, MatmulRoutine, matmul_amax_by, matmul_by};
use burn_fp8::{Bias, Fp8Format, Granularity, MatmulSpec};

use super::super::{
    device::Random,
    gpu::{Gpu, launched},
    random::reference::{self, Sum},
};
use super::{
    elements::{floats, numbers},
    side::{Codes, Side},
};

/// The error of a sum in f32, relative to the sum of its terms' magnitudes.
const SUM_ERROR: f64 = 1.0 / (1 << 20) as f64;

#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) formats: [Fp8Format; 2],
    pub(super) codes: [Codes; 2],
    pub(super) output: FloatDType,
    /// Batch, rows, columns, terms.
    pub(super) size: [usize; 4],
    /// The number of matrices of each side: that of the batch, or one.
    pub(super) batches: [usize; 2],
    pub(super) granularities: [Granularity; 2],
    pub(super) bias: Option<FloatDType>,
    pub(super) amax: bool,
    /// Whether each side's inner dimension is innermost in memory.
    pub(super) inner: [bool; 2],
}

/// The kernels that may compute a case, as the starts and ends of their names with the grid.
fn kernels(routine: MatmulRoutine, [batch, m, n, _]: [usize; 4]) -> Vec<[String; 2]> {
    let tiles = || {
        let grid = format!(" {}x{}x{batch}", n.div_ceil(128), m.div_ceil(128));
        ["tile_kernel".to_string(), grid]
    };
    // At most a cube for each of the GPU's three multiprocessors, or one cluster of two.
    let by_tma = |rows: usize, cluster: usize| {
        let parts = n.div_ceil(128 * cluster) * m.div_ceil(rows) * batch;
        let grid = format!(" {}x1x1", parts.min(3 / cluster) * cluster);
        ["tma_kernel".to_string(), grid]
    };
    let by_tma = match routine {
        MatmulRoutine::Direct => return vec![["matmul_kernel".into(), String::new()]],
        MatmulRoutine::WgmmaTma => by_tma(128, 1),
        MatmulRoutine::WgmmaTma256 => by_tma(256, 1),
        MatmulRoutine::WgmmaTmaMulticast => by_tma(256, 2),
        _ => return vec![tiles()],
    };
    match m.min(n) {
        // A tensor map needs the distance between rows, which a single row does not have unless it is copied.
        1 => vec![by_tma, tiles()],
        _ => vec![by_tma],
    }
}

pub(super) fn check(gpu: Gpu, routine: MatmulRoutine, case: &Case) {
    let Some(client) = gpu.client() else { return };
    let mut random = Random::new(case.size.iter().sum::<usize>() as u64);
    let [batch, m, n, k] = case.size;
    let mut side = |which: usize, rows: usize| {
        let shape = [case.batches[which], rows, k];
        let granularity = match which {
            0 => case.granularities[0],
            _ => case.granularities[1].transposed(),
        };
        let (format, codes) = (case.formats[which], case.codes[which]);
        Side::new(&mut random, format, codes, shape, granularity)
    };
    let (lhs, rhs) = (side(0, m), side(1, n));
    let bias: Vec<f32> = (0..n)
        .map(|column| (column % 64) as f32 / 8.0 - 3.0)
        .collect();
    let row = match case.bias {
        Some(dtype) => Bias::<CubeBackend>::Row(floats(&client, &bias, &[n], dtype)),
        None => Bias::None,
    };
    let [lhs_codes, lhs_scales] = lhs.tensors(&client, false, !case.inner[0]);
    let [rhs_codes, rhs_scales] = rhs.tensors(&client, true, case.inner[1]);
    let (policy, operands) = (MatmulPolicy::Only(routine), [lhs_codes, rhs_codes]);
    let scales = [lhs_scales, rhs_scales];
    let spec = MatmulSpec::new(case.formats[0], case.formats[1], case.output)
        .with_granularities(case.granularities);
    let (product, amax) = match case.amax {
        true => {
            let (product, amax) = matmul_amax_by(policy, operands, scales, row, spec);
            (product, Some(amax))
        }
        false => (matmul_by(policy, operands, scales, row, spec), None),
    };

    let ran = launched(&client);
    let expected = kernels(routine, case.size);
    assert!(
        ran.iter().any(|name| expected
            .iter()
            .any(|[kernel, grid]| name.starts_with(kernel) && name.ends_with(grid))),
        "{expected:?} did not run: {ran:?}"
    );
    if routine != MatmulRoutine::Direct && m.is_multiple_of(4) && !case.inner[0] {
        assert!(ran.iter().any(|name| name.starts_with("turn_rows")));
    }

    let found = numbers(&product);
    assert_eq!(found.len(), batch * m * n);
    if let Some(amax) = amax {
        let (amax, largest) = (numbers(&amax)[0], reference::amax(found.iter().copied()));
        let same = amax == largest || amax.is_nan() && largest.is_nan();
        assert!(same, "{routine}: the amax is {amax}, not {largest}");
    }
    for (index, &found) in found.iter().enumerate() {
        let (matrix, row, column) = (index / (m * n), index / n % m, index % n);
        let terms =
            (0..k).map(|term| lhs.value(matrix, row, term) * rhs.value(matrix, column, term));
        let added = case.bias.map(|_| f64::from(bias[column]));
        let sum = Sum::of(terms.chain(added));
        if let Err(error) = reference::near(found, sum, SUM_ERROR, case.output) {
            panic!("{routine}, row {row}, column {column} of matrix {matrix}: {error}");
        }
    }
}
