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

/// One kernel of some work, by the ops that it computes, and what it reads and writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelTraffic {
    /// The ops, with the tensors that are in memory: `Cast+Mul: f32[8,16] bf16[8,16] -> f32[8,16]`.
    pub name: String,
    /// The bytes that it reads and writes.
    pub bytes: u64,
}

impl<'a> FromIterator<&'a KernelTraffic> for Traffic {
    fn from_iter<T: IntoIterator<Item = &'a KernelTraffic>>(kernels: T) -> Self {
        let add = |sum: Self, kernel: &KernelTraffic| Self {
            kernels: sum.kernels + 1,
            bytes: sum.bytes + kernel.bytes,
        };
        kernels.into_iter().fold(Self::default(), add)
    }
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
    pub fn of(&self, step: impl FnMut()) -> io::Result<Traffic> {
        Ok(self.kernels(step)?.iter().collect())
    }

    /// The kernels of `step`, in their order, as [`of`](Self::of) counts them.
    ///
    /// # Errors
    /// If the log cannot be read.
    pub fn kernels(&self, mut step: impl FnMut()) -> io::Result<Vec<KernelTraffic>> {
        let before = self.length()?;
        step();
        let middle = self.length()?;
        step();
        let log = fs::read(self.0.path())?;
        let text = |log: &[u8]| String::from_utf8_lossy(log).into_owned();
        Ok(kernels(&text(&log[before..middle]), &text(&log[middle..])))
    }

    fn length(&self) -> io::Result<usize> {
        Ok(fs::metadata(self.0.path())?.len() as usize)
    }
}

/// The kernels of the ops in `log`, which `after` continues.
fn kernels(log: &str, after: &str) -> Vec<KernelTraffic> {
    let (blocks, after) = (blocks(log), blocks(after));
    // The block that names each tensor last, even if only to drop it.
    let mut last = HashMap::new();
    for (number, block) in blocks.iter().chain(&after).enumerate() {
        let tensors = block.ops.iter().flat_map(|op| &op.inputs);
        last.extend(tensors.map(|tensor| (tensor.id, number)));
    }
    let mut kernels = Vec::new();
    for (number, block) in blocks.iter().enumerate() {
        let ops = block.ops.iter().filter(|op| op.name != DROP);
        if !block.fused {
            let ops = ops.filter(|op| !op.is_view());
            kernels.extend(ops.map(|op| kernel(&[op], &op.inputs, &op.outputs)));
            continue;
        }
        let ops: Vec<_> = ops.collect();
        let made = ops.iter().flat_map(|op| &op.outputs);
        let ids: HashSet<_> = made.clone().map(|tensor| tensor.id).collect();
        let read = ops.iter().flat_map(|op| &op.inputs);
        let read = read.filter(|tensor| !ids.contains(&tensor.id));
        let is_used = |tensor: &&Tensor| last.get(&tensor.id).is_some_and(|at| *at > number);
        kernels.push(kernel(&ops, read, made.filter(is_used)));
    }
    kernels
}

/// The kernel of `ops` that reads and writes these tensors, each of them once.
fn kernel<'a>(
    ops: &[&Op],
    read: impl IntoIterator<Item = &'a Tensor>,
    written: impl IntoIterator<Item = &'a Tensor>,
) -> KernelTraffic {
    let mut seen = HashSet::new();
    let mut bytes = 0;
    let mut once = |tensor: &&Tensor| {
        let new = seen.insert(tensor.id);
        bytes += if new { tensor.bytes } else { 0 };
        new
    };
    let mut forms = |tensors: &mut dyn Iterator<Item = &'a Tensor>| {
        let tensors = tensors.filter(&mut once);
        let forms: Vec<_> = tensors.map(|tensor| tensor.form.as_str()).collect();
        forms.join(" ")
    };
    let read = forms(&mut read.into_iter());
    let written = forms(&mut written.into_iter());
    let ops: Vec<_> = ops.iter().map(|op| op.short()).collect();
    let name = format!("{}: {read} -> {written}", ops.join("+"));
    KernelTraffic { name, bytes }
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

struct Tensor {
    id: u64,
    /// The dtype and shape, as in the log.
    form: String,
    bytes: u64,
}

/// The log's name for the end of a tensor.
const DROP: &str = "Drop";

impl Op {
    /// Whether the op only changes the shape.
    fn is_view(&self) -> bool {
        ["Reshape", "SwapDims", "Permute", "Expand"].contains(&self.short())
    }

    /// The name without its family.
    fn short(&self) -> &str {
        self.name.rsplit("::").next().unwrap_or_default()
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
            form: tensor.into(),
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
        let traffic = |after| kernels(STEP, after).iter().collect::<Traffic>();
        let fused = 128 * 2 + 16 * 4 + 128 * 4 + 128 * 4;
        let unfused = 128 * 4 + 4;
        let bytes = fused + unfused;
        assert_eq!(traffic(next), Traffic { kernels: 2, bytes });
        // The square is not written if nothing names it later.
        assert_eq!(traffic("").bytes, bytes - 128 * 4);
    }

    #[test]
    fn a_kernel_is_named_by_its_ops_and_tensors() {
        let names: Vec<_> = kernels(STEP, "").into_iter().map(|it| it.name).collect();
        let fused = "Cast+Mul+Add: bf16[8,16] f32[1,16] -> f32[8,16]";
        assert_eq!(names, [fused, "Sum: f32[128] -> f32[1]"]);
    }
}
