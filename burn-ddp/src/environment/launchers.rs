//! The variables of each launcher.

/// Variables by which one launcher describes a rank.
pub(super) struct Launcher {
    pub(super) name: &'static str,
    pub(super) rank: &'static str,
    pub(super) world_size: &'static str,
    pub(super) local_rank: &'static [&'static str],
    pub(super) local_size: &'static [&'static str],
    /// The number of machines.
    pub(super) machines: &'static [&'static str],
}

pub(super) const LAUNCHERS: [Launcher; 6] = [
    Launcher {
        name: TORCHRUN,
        rank: "RANK",
        world_size: "WORLD_SIZE",
        local_rank: &[LOCAL_RANK],
        local_size: &["LOCAL_WORLD_SIZE"],
        machines: &[],
    },
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        machines: &[],
    },
    Launcher {
        name: "MVAPICH",
        rank: "MV2_COMM_WORLD_RANK",
        world_size: "MV2_COMM_WORLD_SIZE",
        local_rank: &["MV2_COMM_WORLD_LOCAL_RANK"],
        local_size: &["MV2_COMM_WORLD_LOCAL_SIZE"],
        machines: &[],
    },
    Launcher {
        name: PMI,
        rank: "PMI_RANK",
        world_size: "PMI_SIZE",
        local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
        local_size: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
        machines: &[],
    },
    // flux-environment(7).
    Launcher {
        name: "Flux",
        rank: FLUX_RANK,
        world_size: "FLUX_JOB_SIZE",
        local_rank: &["FLUX_TASK_LOCAL_ID"],
        local_size: &[],
        machines: &["FLUX_JOB_NNODES"],
    },
    Launcher {
        name: SLURM,
        rank: "SLURM_PROCID",
        world_size: "SLURM_NTASKS",
        local_rank: &["SLURM_LOCALID"],
        local_size: &["SLURM_NTASKS_PER_NODE"],
        machines: &["SLURM_STEP_NUM_NODES", "SLURM_NNODES"],
    },
];

pub(super) const TORCHRUN: &str = "torchrun";
pub(super) const PMI: &str = "PMI";
pub(super) const SLURM: &str = "Slurm";

/// The number of a step within a Slurm job. Slurm sets it in the tasks that srun starts, and not in the
/// batch script, whose step has no number (slurmstepd's `setup_env`).
pub(super) const SLURM_STEP: &str = "SLURM_STEP_ID";

/// A task's number among all tasks of its Flux job.
pub(super) const FLUX_RANK: &str = "FLUX_TASK_RANK";

pub(super) const LOCAL_RANK: &str = "LOCAL_RANK";
