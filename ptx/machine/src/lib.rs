//! A PTX emulator: it runs PTX from NVRTC or from LLVM on host memory.
//!
//! It is strict rather than fast. Instructions mean what NVIDIA's PTX ISA (8.8) says, not what the kernels expect. If the ISA
//! leaves a result undefined (memory that nobody wrote, data that no barrier orders, registers of an instruction that is still in
//! flight), or an instruction is not known here, the run ends with the line of PTX and the error. Asynchronous copies arrive as
//! late as possible.

mod access;
mod atomic;
mod barrier;
mod block;
mod carry;
mod cluster;
mod convert;
mod copy;
mod decode;
mod float;
mod fp8;
mod global;
mod integer;
mod ldmatrix;
mod mma;
mod number;
mod parse;
mod shared;
mod thread;
mod tma;
mod together;
mod transfer;
mod warp;
mod wgmma;
mod wmma;

pub use fp8::Fp8;
pub use global::Global;
pub use tma::{TensorMap, Window};

use std::cell::RefCell;

use block::Block;
use cluster::Cluster;
use decode::Instruction;

/// The error is a description.
type Result<T> = std::result::Result<T, String>;

/// A kernel, ready to run.
pub struct Kernel {
    /// Its name in PTX.
    pub name: String,
    instructions: Vec<Instruction>,
    /// The number of registers of a thread.
    registers: usize,
    parameters: Vec<Parameter>,
    /// The bytes of shared memory that are declared with a size.
    static_shared: usize,
    /// The smallest piece of shared memory that it reads or writes, in bytes.
    grain: usize,
    /// The bytes of a thread's local memory.
    local: usize,
    /// Data of the module.
    data: Vec<u8>,
    most_threads: Option<u32>,
    /// The blocks of a cluster.
    cluster: [u32; 3],
}

/// The position of a parameter in the parameters' memory.
struct Parameter {
    name: String,
    offset: usize,
    size: usize,
    /// Known by its alignment, which a struct of numbers does not have.
    is_tensor_map: bool,
}

/// An argument of a launch.
#[derive(Debug)]
pub enum Argument<'a> {
    /// The address of a buffer.
    Pointer(u64),
    /// A number, or a struct.
    Bytes(&'a [u8]),
    /// A tensor map.
    TensorMap(TensorMap),
}

/// A launch of a kernel.
pub struct Launch<'a> {
    /// The blocks of the grid.
    pub grid: [u32; 3],
    /// The threads of a block.
    pub threads: [u32; 3],
    /// The shared memory of a block, in bytes, beside what the kernel declares with a size.
    pub dynamic_shared: usize,
    /// One for each parameter. Those that are left over are ignored.
    pub arguments: Vec<Argument<'a>>,
}

impl Kernel {
    /// Parses PTX that has one entry.
    ///
    /// # Panics
    /// If there is something that the machine does not know, with the line.
    pub fn new(ptx: &str) -> Self {
        decode::kernel(parse::parse(ptx))
    }

    /// The size of each parameter in bytes, and whether it is a tensor map.
    pub fn parameter_sizes(&self) -> impl Iterator<Item = (usize, bool)> {
        self.parameters
            .iter()
            .map(|parameter| (parameter.size, parameter.is_tensor_map))
    }

    /// Runs all clusters, one after the other, and returns how many instructions their threads ran.
    pub fn run(&self, launch: Launch, global: &mut Global) -> Result<u64> {
        let threads: u32 = launch.threads.iter().product();
        if threads > self.most_threads.unwrap_or(1024) {
            return Err(format!("{threads} threads are more than .maxntid"));
        }
        if launch.grid[1] > 0xFFFF || launch.grid[2] > 0xFFFF {
            return Err(format!("a grid of {:?}", launch.grid));
        }
        let (parameters, maps) = self.parameters(launch.arguments)?;
        global.end_launch();
        let whole = |axis: usize| launch.grid[axis].is_multiple_of(self.cluster[axis]);
        if !(0..3).all(whole) {
            let (grid, cluster) = (launch.grid, self.cluster);
            return Err(format!("a grid of {grid:?} in clusters of {cluster:?}"));
        }
        let clusters = [0, 1, 2].map(|axis| launch.grid[axis] / self.cluster[axis]);
        let global = RefCell::new(global);
        let mut count = 0;
        for first in places(clusters) {
            let blocks = places(self.cluster).enumerate().map(|(number, place)| {
                let place = [0, 1, 2].map(|axis| first[axis] * self.cluster[axis] + place[axis]);
                Block::new(
                    self,
                    number,
                    place,
                    launch.grid,
                    launch.threads,
                    self.static_shared + launch.dynamic_shared,
                    &parameters,
                    &maps,
                    &global,
                )
            });
            count += Cluster::new(blocks.collect())
                .run()
                .map_err(|error| format!("{}, {error}", self.name))?;
        }
        Ok(count)
    }

    /// The parameters' memory, in which a tensor map is represented by its number.
    fn parameters(&self, arguments: Vec<Argument>) -> Result<(Vec<u8>, Vec<TensorMap>)> {
        let end = self
            .parameters
            .last()
            .map_or(0, |last| last.offset + last.size);
        let (mut memory, mut maps) = (vec![0; end], Vec::new());
        let (given, taken) = (arguments.len(), self.parameters.len());
        if given < taken {
            return Err(format!("{given} arguments for {taken} parameters"));
        }
        for (parameter, argument) in self.parameters.iter().zip(arguments) {
            let to = &mut memory[parameter.offset..][..parameter.size];
            match argument {
                Argument::Pointer(address) if to.len() == 8 => {
                    to.copy_from_slice(&address.to_le_bytes());
                }
                Argument::Bytes(bytes) if bytes.len() >= to.len() && !parameter.is_tensor_map => {
                    to.copy_from_slice(&bytes[..to.len()]);
                }
                Argument::TensorMap(map) if parameter.is_tensor_map => {
                    map.check()?;
                    to[..8].copy_from_slice(&(maps.len() as u64 + 1).to_le_bytes());
                    maps.push(map);
                }
                other => {
                    let (name, size) = (&parameter.name, parameter.size);
                    return Err(format!("{name} of {size} bytes is no {other:?}"));
                }
            }
        }
        Ok((memory, maps))
    }
}

/// The places of a grid, the first dimension fastest.
fn places([across, down, deep]: [u32; 3]) -> impl Iterator<Item = [u32; 3]> {
    (0..across * down * deep)
        .map(move |index| [index % across, index / across % down, index / across / down])
}
