//! Compares fp8 products with Burn's in bf16 and with PyTorch's.

use benches::{
    Comparison, Goal, Goals, Launches, Table, lines_of, multiplied_by, problem_of, quartiles,
    time_left, torch_script, unpaired_ratio,
};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_fp8::{
    Fp8Format, Fp8Tensor,
    kernels::{MatmulPolicy, MatmulRoutine, set_matmul_policy},
    scaled_matmul,
};
use cudarc::driver::CudaContext;
use serde::{Deserialize, Serialize};
use std::{cell::Cell, collections::BTreeMap, time::Duration};

use super::{distance, is_computed, question::Known, random, sync};

/// M, K and N, for square matrices, and for the layers of a language model of width 4,096 over 8,192 tokens.
pub(crate) const SIZES: [[usize; 3]; 7] = [
    [2_048, 2_048, 2_048],
    [4_096, 4_096, 4_096],
    [8_192, 8_192, 8_192],
    [16_384, 16_384, 16_384],
    [8_192, 4_096, 6_144],
    [8_192, 4_096, 14_336],
    [8_192, 14_336, 4_096],
];

/// The number of terms of a product that is launched like others, and computed in hardly any time.
const FEW: usize = 128;

const BF16: &str = "bf16, Burn";
/// On NVIDIA's GPUs these products are of TF32.
const F32: &str = "f32, Burn";
const DECODED: &str = "e4m3, decoded";
const PICKED: &str = "e4m3, as it is picked";

/// PyTorch's products of one size: a line that `torch/scaled_mm.py` prints.
#[derive(Serialize, Deserialize)]
pub(crate) struct Torch {
    size: [usize; 3],
    /// The seconds that a product takes, round by round.
    bf16: Vec<f64>,
    /// The seconds of `torch._scaled_mm` with precise sums, like ours. `fast` has those with fast sums.
    e4m3: Vec<f64>,
    fast: Vec<f64>,
}

/// Times PyTorch's products of some sizes, if it is installed, in at most a quarter of the time that is left.
pub(crate) fn torch(sizes: &[[usize; 3]]) -> Vec<Torch> {
    let mut found: Vec<Torch> = Vec::new();
    let mut script = torch_script("scaled_mm.py");
    script.args(sizes.iter().map(|[m, k, n]| format!("{m}x{k}x{n}")));
    let limit = time_left().map(|left| left / 4);
    let end = lines_of(&mut script, limit, |line| {
        found.extend(serde_json::from_str::<Torch>(line));
    });
    if let Some(problem) = problem_of(end) {
        println!("PyTorch's products could not all be timed: {problem}\n");
    }
    found
}

/// The operands of one product, in bf16 and quantized. The right one has a contiguous inner dimension, as fp8 hardware needs it.
struct Operands {
    high: [Tensor<2>; 2],
    low: [Fp8Tensor<2>; 2],
}

impl Operands {
    fn new([m, k, n]: [usize; 3], device: &Device) -> Self {
        let [a, b] = [random([m, k], device), random([n, k], device)];
        let [a8, b8] = [&a, &b].map(|x| Fp8Tensor::quantize(x.clone(), Fp8Format::E4M3));
        Self {
            high: [a, b.transpose()],
            low: [a8, b8.transpose()],
        }
    }

    fn bf16(&self) -> Tensor<2> {
        let [a, b] = &self.high;
        a.clone().matmul(b.clone())
    }

    fn f32(&self) -> [Tensor<2>; 2] {
        self.high.clone().map(|x| x.cast(FloatDType::F32))
    }

    fn by(&self, policy: MatmulPolicy) -> Tensor<2> {
        set_matmul_policy(policy);
        let [a, b] = &self.low;
        let product = scaled_matmul(a, b, None, FloatDType::BF16);
        product.expect("the shapes fit")
    }
}

/// The number of sets of operands that are multiplied in turn. In fp8, all sets together are larger than a GPU's cache.
/// `torch/scaled_mm.py` has as many.
fn sets([m, k, n]: [usize; 3]) -> usize {
    ((128 << 20) / (m * k + k * n)).clamp(2, 16)
}

/// Computes one product by a routine, and panics if the GPU does not work any more. Whether the product is right is not asked.
pub(crate) fn compute_one(routine: MatmulRoutine, size: [usize; 3], device: &Device) {
    let product = Operands::new(size, device).by(MatmulPolicy::Only(routine));
    if let Err(error) = product.slice([0..1, 0..1]).try_into_data() {
        eprintln!("{routine}: {error}");
    }
    is_computed(random([1, 1], device));
}

pub(crate) fn compare(size @ [m, k, n]: [usize; 3], known: &Known, device: &Device) {
    let mut native = native_routines();
    native.retain(|routine| !known.broken.contains(routine));
    let torch = known.torch.iter().find(|torch| torch.size == size);
    let question = format!("What does a product cost? [{m}, {k}] by [{k}, {n}]");
    let operands: Vec<Operands> = (0..sets(size))
        .map(|_| Operands::new(size, device))
        .collect();
    let only = MatmulPolicy::Only;
    let mut ways = vec![(DECODED.to_owned(), only(MatmulRoutine::Decoded))];
    // All routines are tried for it.
    if known.broken.is_empty() {
        ways.push((PICKED.to_owned(), MatmulPolicy::Automatic));
    }
    ways.extend(
        native
            .iter()
            .map(|routine| (name(*routine), only(*routine))),
    );
    let looked = look(&operands[0], &mut ways, &native);

    let turn = Cell::new(0);
    let next = || {
        turn.set(turn.get() + 1);
        &operands[turn.get() % operands.len()]
    };
    let wait = || sync(device);
    // Two sets are larger than a GPU's cache.
    let wide: Vec<_> = operands.iter().take(2).map(Operands::f32).collect();
    let mut wide = wide.iter().cycle();
    let single = || {
        let [a, b] = wide.next().expect("it has no end").clone();
        a.matmul(b)
    };
    let mut table = Comparison::empty(&question).within(time_left());
    table = table.with_queue(BF16, || next().bf16(), wait, is_computed);
    table = table.with_queue(F32, single, wait, is_computed);
    for (name, policy) in &ways {
        let job = || next().by(*policy);
        table = table.with_queue(name, job, wait, is_computed);
    }
    let table = table.run(20);
    set_matmul_policy(MatmulPolicy::Automatic);

    let medians = |times: &[f64]| quartiles(times.iter().copied());
    let mut table = table.with_column("TFLOP/s", |row| {
        let rate = 2.0 * (m * k * n) as f64 / row.median.as_secs_f64() / 1e12;
        format!("{rate:.1}")
    });
    // The distance of the decoded product is that from the product in bf16.
    table = table.with_column("off the decoded product", |row| {
        let off = looked.off.get(&row.name);
        off.map_or(String::new(), |off| format!("{off:.4}"))
    });
    let theirs: Vec<(&str, [f64; 3])> = torch.map_or_else(Vec::new, |torch| {
        vec![
            ("bf16", medians(&torch.bf16)),
            ("_scaled_mm", medians(&torch.e4m3)),
            ("_scaled_mm with fast sums", medians(&torch.fast)),
        ]
    });
    for (name, theirs) in &theirs {
        table = table.with_column(&format!("PyTorch's {name}, of its time"), |row| {
            format!("{:.3}", theirs[1] / row.median.as_secs_f64())
        });
    }
    println!("{table}");
    for note in looked.notes {
        println!("- {note}");
    }
    if !known.broken.is_empty() {
        let broken: Vec<_> = known.broken.iter().map(ToString::to_string).collect();
        let broken = broken.join(", ");
        println!(
            "- left out, because its first product failed or took too long: {broken}; and {PICKED}, which would try it"
        );
    }

    let mut goals = Goals::new(&question);
    let library = name(MatmulRoutine::CublasLt);
    let their_rounds = torch.map_or(0, |torch| torch.e4m3.len());
    for row in &table.rows {
        let routine = native.iter().find(|routine| name(**routine) == row.name);
        match (routine, theirs.get(1)) {
            (Some(MatmulRoutine::CublasLt), Some((_, theirs))) => goals.add_timed(
                &format!("{library}: rate, of PyTorch's _scaled_mm"),
                Some(unpaired_ratio(*theirs, medians(&row.times))),
                table.rounds.min(their_rounds),
                Goal::AtLeast(0.95),
            ),
            (Some(routine), _) if *routine != MatmulRoutine::CublasLt => goals.add_timed(
                &format!("{}: rate, of Burn's in bf16", row.name),
                table.ratio(BF16, &row.name),
                table.rounds,
                Goal::AtLeast(1.3),
            ),
            _ => {}
        }
    }
    println!("{goals}");
    ways.retain(|(_, policy)| native.iter().any(|routine| only(*routine) == *policy));
    if time_left() != Some(Duration::ZERO) {
        note_launches(&table, &ways, size, device);
    }
}

/// Prints in which ways a product takes less than twice the time of one with few terms: there the host, which launches it, decides
/// about its time, not the device.
fn note_launches(
    table: &Table,
    ways: &[(String, MatmulPolicy)],
    [m, _, n]: [usize; 3],
    device: &Device,
) {
    let operands = Operands::new([m, FEW, n], device);
    let mut few = Comparison::empty("What does it take to launch a product?");
    for (name, policy) in ways {
        let job = || operands.by(*policy);
        few = few.with_queue(name, job, || sync(device), is_computed);
    }
    for few in few.run(5).rows {
        let (name, launching) = (&few.name, few.median);
        if table
            .row(name)
            .is_some_and(|row| row.median < 2 * launching)
        {
            println!(
                "- {name}: with only {FEW} terms it takes {launching:.3?}, so launching decides\n"
            );
        }
    }
}

fn name(routine: MatmulRoutine) -> String {
    format!("e4m3, {routine}")
}

/// The result of `look`.
struct Looked {
    /// The distance of each product from the decoded one, and of the decoded one from the product in bf16.
    off: BTreeMap<String, f32>,
    notes: Vec<String>,
}

/// Computes one product in each way, and checks its values and the kernels that computed it, because another routine steps in
/// where one cannot compute it. Ways that are wrong, or computed by another routine, are removed.
fn look(
    operands: &Operands,
    ways: &mut Vec<(String, MatmulPolicy)>,
    native: &[MatmulRoutine],
) -> Looked {
    let decoded = || operands.by(MatmulPolicy::Only(MatmulRoutine::Decoded));
    let (mut off, mut notes) = (BTreeMap::new(), Vec::new());
    let mut is_known = |(name, policy): &(String, MatmulPolicy)| -> Result<(), String> {
        let expected = match name == DECODED {
            true => operands.bf16(),
            false => decoded(),
        };
        let distance = distance(operands.by(*policy), expected)?;
        off.insert(name.clone(), distance);
        // Each factor has an error of at most a sixteenth, and sums of random errors are no worse. Tensor cores add with 14 bits.
        if distance.is_nan() || distance > if name == DECODED { 0.09 } else { 0.05 } {
            return Err(format!("it is {distance} off"));
        }
        let launches = Launches::of(|| is_computed(operands.by(*policy)));
        let by = multiplied_by(&launches);
        let here = |routine: &&MatmulRoutine| by.len() == 1 || native.contains(routine);
        let shown: Vec<_> = by.iter().filter(here).map(ToString::to_string).collect();
        let shown = match &shown[..] {
            [] => "no routine that is known".to_string(),
            shown => shown.join(" or "),
        };
        match policy {
            MatmulPolicy::Only(routine) if !by.contains(routine) => {
                let kernels: Vec<_> = launches.0.keys().cloned().collect();
                Err(format!("computed by {shown} ({})", kernels.join(", ")))
            }
            MatmulPolicy::Only(_) => Ok(()),
            _ => {
                notes.push(format!("{name}: {shown}"));
                Ok(())
            }
        }
    };
    let mut refused = Vec::new();
    ways.retain(|way| {
        let known = is_known(way);
        if let Err(why) = &known {
            refused.push(format!("{} is left out: {why}", way.0));
        }
        known.is_ok()
    });
    notes.extend(refused);
    Looked { off, notes }
}

/// The routines that multiply fp8 natively on this GPU: those for its tensor cores, if they are compiled in (others would be
/// emulated), and cuBLASLt (if it is not installed, another routine is used, and `look` removes it).
pub(crate) fn native_routines() -> Vec<MatmulRoutine> {
    let gpu = CudaContext::new(0).expect("a GPU");
    let mut native = match gpu.compute_capability().expect("a GPU") {
        (9, 0) => vec![
            MatmulRoutine::Wgmma,
            MatmulRoutine::WgmmaTma,
            MatmulRoutine::WgmmaTma256,
            MatmulRoutine::WgmmaTmaMulticast,
        ],
        (8, 9) | (12, 0 | 1) => vec![MatmulRoutine::Mma],
        (10, 0 | 3) => vec![],
        _ => return vec![],
    };
    native.retain(|_| cfg!(feature = "cuda-cpp"));
    native.push(MatmulRoutine::CublasLt);
    native
}
