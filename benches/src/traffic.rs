//! The memory traffic of kernels, as Burn's fusion forms them.

use std::{
    collections::{HashMap, HashSet},
    fs, io,
};

use burn_std::config::{BurnConfig, RuntimeConfig};
use serde_json::json;
use tempfile::NamedTempFile;

/// The number of bytes that the kernels of some work read and write, on a backend that fuses ops. Each tensor counts once for
/// each kernel. Repeated reads within a kernel, as in products, are not counted, nor caches, copies that a kernel asks for, or
/// autotune.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// The number of kernels. Views have none.
    pub kernels: usize,
    /// The bytes that they read and write.
    pub bytes: u64,
}

/// Burn's log of the ops that it fuses, in a file.
pub struct FusionLog(NamedTempFile);

impl FusionLog {
    /// Makes Burn write the log. `None` if Burn has already read its configuration: call this before anything else.
    ///
    /// # Errors
    /// If the file cannot be created.
    pub fn start() -> io::Result<Option<Self>> {
        let file = NamedTempFile::new()?;
        let config = BurnConfig::from_current_dir().override_from_env();
        let mut config = serde_json::to_value(config)?;
        config["fusion"]["logger"] = json!({ "level": "full", "file": file.path() });
        let config: BurnConfig = serde_json::from_value(config)?;
        Ok(BurnConfig::try_set(config).then_some(Self(file)))
    }

    /// The traffic of `step`, which must wait until everything is computed. It runs twice: a tensor that the first run computes
    /// and the second run uses must have been written to memory.
    ///
    /// # Errors
    /// If the log cannot be read.
    pub fn of(&self, mut step: impl FnMut()) -> io::Result<Traffic> {
        let before = self.length()?;
        step();
        let middle = self.length()?;
        step();
        let log = fs::read(self.0.path())?;
        let text = |log: &[u8]| String::from_utf8_lossy(log).into_owned();
        Ok(traffic(&text(&log[before..middle]), &text(&log[middle..])))
    }

    fn length(&self) -> io::Result<usize> {
        Ok(fs::metadata(self.0.path())?.len() as usize)
    }
}

/// The traffic of the ops in `log`, which `after` continues.
fn traffic(log: &str, after: &str) -> Traffic {
    let (blocks, after) = (blocks(log), blocks(after));
    // The block that names each tensor last, even if only to drop it.
    let mut last = HashMap::new();
    for (number, block) in blocks.iter().chain(&after).enumerate() {
        let tensors = block.ops.iter().flat_map(|op| &op.inputs);
        last.extend(tensors.map(|tensor| (tensor.id, number)));
    }
    let mut traffic = Traffic::default();
    let mut add = |tensors: HashSet<&Tensor>| {
        traffic.kernels += 1;
        traffic.bytes += tensors.iter().map(|tensor| tensor.bytes).sum::<u64>();
    };
    for (number, block) in blocks.iter().enumerate() {
        let ops = block.ops.iter().filter(|op| op.name != DROP);
        if !block.fused {
            ops.filter(|op| !op.is_view())
                .for_each(|op| add(op.inputs.iter().chain(&op.outputs).collect()));
            continue;
        }
        let ops: Vec<_> = ops.collect();
        let made: HashSet<_> = ops.iter().flat_map(|op| &op.outputs).collect();
        let ids: HashSet<_> = made.iter().map(|tensor| tensor.id).collect();
        let read = ops.iter().flat_map(|op| &op.inputs);
        let read = read.filter(|tensor| !ids.contains(&tensor.id));
        let is_used = |tensor: &&Tensor| last.get(&tensor.id).is_some_and(|at| *at > number);
        add(read.chain(made.into_iter().filter(is_used)).collect());
    }
    traffic
}

/// Ops that are one fused kernel or, if not fused, one kernel each.
struct Block {
    fused: bool,
    ops: Vec<Op>,
}

struct Op {
    name: String,
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
}

#[derive(PartialEq, Eq, Hash)]
struct Tensor {
    id: u64,
    bytes: u64,
}

/// The log's name for the end of a tensor.
const DROP: &str = "Drop";

impl Op {
    /// Whether the op only changes the shape.
    fn is_view(&self) -> bool {
        let name = self.name.rsplit("::").next();
        name.is_some_and(|name| ["Reshape", "SwapDims", "Permute", "Expand"].contains(&name))
    }
}

impl Tensor {
    /// Parses a tensor such as `t12:f32[8,16]`.
    fn read(text: &str) -> Option<Self> {
        let (id, tensor) = text.strip_prefix('t')?.split_once(':')?;
        let (dtype, shape) = tensor.strip_suffix(']')?.split_once('[')?;
        let bytes = match dtype {
            "f64" | "i64" | "u64" => 8,
            "f16" | "bf16" | "i16" | "u16" => 2,
            "i8" | "u8" | "bool(U8)" => 1,
            _ => 4,
        };
        let dims = shape.split(',').filter(|dim| !dim.is_empty());
        let dims: Option<Vec<u64>> = dims.map(|dim| dim.trim().parse().ok()).collect();
        Some(Self {
            id: id.parse().ok()?,
            bytes: dims?.iter().product::<u64>() * bytes,
        })
    }
}

/// The blocks of all tables in the log, in order.
fn blocks(log: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut columns = None;
    for line in log.lines() {
        if line.starts_with("idx ") {
            columns = ["block", "op ", "inputs", "outputs"]
                .iter()
                .map(|column| line.find(column))
                .collect::<Option<Vec<_>>>();
            continue;
        }
        if line.starts_with("---") {
            continue;
        }
        let Some(columns) = columns.as_deref().filter(|_| is_row(line)) else {
            columns = None;
            continue;
        };
        // Byte positions in the title are positions of characters here, because the title is ASCII and rows are not.
        let letters: Vec<char> = line.chars().collect();
        let column = |from: usize| {
            let to = columns.get(from + 1).copied().unwrap_or(letters.len());
            let cell = letters.get(columns[from]..to.min(letters.len()));
            String::from_iter(cell.unwrap_or_default())
                .trim()
                .to_string()
        };
        let tensors = |from| column(from).split(", ").filter_map(Tensor::read).collect();
        let head = column(0);
        if !head.is_empty() || blocks.is_empty() {
            let fused = !head.contains("un-fused");
            blocks.push(Block {
                fused,
                ops: Vec::new(),
            });
        }
        let block = blocks.last_mut().expect("one was begun");
        block.ops.push(Op {
            name: column(1),
            inputs: tensors(2),
            outputs: tensors(3),
        });
    }
    blocks
}

fn is_row(line: &str) -> bool {
    line.starts_with(|first: char| first.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: &str = "
[plan] cache hit: execute plan #1 (lazy, segment has 3 ops)
═══════════════════════
fusion trace (6 ops, 2 blocks)
idx  block                                op                   inputs                      outputs
---  -----------------------------------  -------------------  --------------------------  --------------
0    ▸ fused ElementWise (score=7, 4 ops)  BaseFloat::Cast      t1:bf16[8,16]               t2:f32[8,16]
1                                         NumericFloat::Mul    t2:f32[8,16], t2:f32[8,16]  t3:f32[8,16]
2                                         Drop                 t2:f32[8,16]
3                                         NumericFloat::Add    t3:f32[8,16], t9:f32[1,16]  t4:f32[8,16]
4    ▸ un-fused (2 ops)                   BaseFloat::Reshape   t4:f32[8,16]                t5:f32[128]
5                                         NumericFloat::Sum    t5:f32[128]                 t6:f32[1]
";

    /// Of the four fused ops, the input, the square (which the next step drops), the row and the sum are in memory, but the cast
    /// is not. The view is no kernel.
    #[test]
    fn a_kernel_reads_and_writes_what_outlives_it() {
        let next = "\
idx  block              op    inputs        outputs
0    ▸ un-fused (1 op)  Drop  t3:f32[8,16]
";
        let found = traffic(STEP, next);
        let fused = 128 * 2 + 16 * 4 + 128 * 4 + 128 * 4;
        let unfused = 128 * 4 + 4;
        let bytes = fused + unfused;
        assert_eq!(found, Traffic { kernels: 2, bytes });
        // The square is not written if nothing names it later.
        let found = traffic(STEP, "");
        assert_eq!(found.bytes, bytes - 128 * 4);
    }
}
