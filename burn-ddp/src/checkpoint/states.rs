//! The part of a checkpoint that differs between ranks.

use std::{fs, io, path::Path};

use rmp_serde::{Deserializer, Serializer, decode, encode};
use serde::{Serialize, de::DeserializeOwned};

use super::{Checkpoint, Checkpoints};
use crate::DdpError;

/// The file with the states of all ranks, in MessagePack, which unlike JSON keeps all floats unchanged.
const RANKS: &str = "ranks.msgpack";

impl Checkpoint {
    /// The state that rank `rank` passed to [`Checkpoints::save_with`].
    ///
    /// # Errors
    ///
    /// [`DdpError::Checkpoint`] when the checkpoint has no states, none of that rank, or one of a different type.
    pub fn state<T: DeserializeOwned>(&self, rank: usize) -> Result<T, DdpError> {
        let states = self.states()?;
        let state = states.get(rank).ok_or_else(|| {
            self.no_state(format!(
                "it has the states of {} ranks, and none of rank {rank}; what is the same on all ranks, such as a \
                 `SamplerState`, can be read with `state(0)`",
                states.len()
            ))
        })?;
        decode(state).map_err(|error| self.no_state(error))
    }

    /// The number of ranks whose [states](Self::state) it has: those of the job that saved it. A job that goes on with more
    /// ranks has to choose what the new ones begin with.
    ///
    /// # Errors
    ///
    /// [`DdpError::Checkpoint`] when the checkpoint has no states.
    pub fn ranks(&self) -> Result<usize, DdpError> {
        Ok(self.states()?.len())
    }

    fn states(&self) -> Result<Vec<Vec<u8>>, DdpError> {
        let text = fs::read(self.folder.join(RANKS)).map_err(|error| self.no_state(error))?;
        decode(&text).map_err(|error| self.no_state(error))
    }

    fn no_state(&self, problem: impl ToString) -> DdpError {
        DdpError::Checkpoint {
            path: self.folder.join(RANKS),
            problem: problem.to_string(),
        }
    }
}

impl Checkpoints {
    /// Saves a checkpoint with a state of each rank in addition to the files that rank 0 writes: for example,
    /// the positions of its sampler and its random numbers. If the files contain the model, the optimizer and
    /// everything else that is the same on all ranks, all ranks can continue as if nothing had happened.
    ///
    /// ```
    /// use burn::{module::Module, nn::LinearConfig, optim::SgdConfig, tensor::Device};
    /// use burn_ddp::{Checkpoints, DistributedSampler, ProcessGroup, SamplerState};
    /// use serde::{Deserialize, Serialize};
    /// use std::io;
    ///
    /// #[derive(Serialize, Deserialize)]
    /// struct State {
    ///     sampler: SamplerState,
    ///     seed: u64, // and a loss scaler's state
    /// }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path();
    /// let group = ProcessGroup::single(); // in a job: ProcessGroup::init()?
    /// let mut model = LinearConfig::new(4, 2).init(&Device::flex().autodiff());
    /// let mut optimizer = SgdConfig::new().init();
    /// let mut sampler = DistributedSampler::new(64, group.rank(), group.world_size());
    /// let checkpoints = Checkpoints::new(path, &group)?;
    ///
    /// let state = State { sampler: sampler.state(10), seed: 7 + group.rank() as u64 };
    /// checkpoints.save_with(10, None, &state, |folder| {
    ///     let model = model.valid().save_file(folder.join("model.bpk"));
    ///     model.map_err(io::Error::other)?;
    ///     optimizer.save(folder.join("optimizer.bpk")).map_err(io::Error::other)
    /// })?;
    ///
    /// if let Some(last) = checkpoints.latest()? {
    ///     model = model.try_load_file(last.folder.join("model.bpk"))?;
    ///     optimizer = optimizer.from_bytes(last.read("optimizer.bpk")?)?;
    ///     // Where there are more ranks than before, the new ones begin with the last one's state.
    ///     let rank = group.rank().min(last.ranks()? - 1);
    ///     let state: State = last.state(rank)?;
    ///     sampler.load_state(&state.sampler);
    ///     assert_eq!((sampler.len(), state.seed), (54, 7));
    /// }
    /// # let _ = (model, optimizer);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Burn's devices do not expose the state of their random numbers: seed them (`Device::seed`) from the rank
    /// and the step at the start and after each checkpoint, and in the same way after a resume.
    ///
    /// # Errors
    ///
    /// As [`save`](Self::save); also when a state cannot be serialized.
    pub fn save_with<T: Serialize>(
        &self,
        step: u64,
        metric: Option<f64>,
        state: &T,
        write: impl FnOnce(&Path) -> io::Result<()>,
    ) -> Result<(), DdpError> {
        // A rank that cannot serialize its state sends nothing, so that the others do not wait for it.
        let own = encode(state);
        let told = own.as_deref().unwrap_or_default();
        let states = self.group.all_gather_bytes(told)?;
        if let Some(rank) = states.iter().position(Vec::is_empty) {
            let problem = match own {
                Err(error) if rank == self.group.rank() => format!(": {error}"),
                _ => String::new(),
            };
            let problem = format!("the state of rank {rank} cannot be serialized{problem}");
            return Err(self.failed(problem.as_bytes()));
        }
        self.save(step, metric, |folder| {
            write(folder)?;
            let states = encode(&states).map_err(io::Error::other)?;
            fs::write(folder.join(RANKS), states)
        })
    }
}

/// Serializes a value with the names of its fields, so that types can get new fields later.
fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, encode::Error> {
    let mut bytes = Vec::new();
    let serializer = Serializer::new(&mut bytes).with_struct_map();
    value.serialize(&mut serializer.with_human_readable())?;
    Ok(bytes)
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, decode::Error> {
    T::deserialize(&mut Deserializer::from_read_ref(bytes).with_human_readable())
}
