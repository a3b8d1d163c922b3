//! The environment variables that each launcher sets.

/// The variables by which one launcher describes a rank.
pub(super) struct Launcher {
    pub(super) name: &'static str,
    pub(super) rank: &'static str,
    /// The first of these that is set counts. The same holds for the other lists, except `job`.
    pub(super) world_size: &'static [&'static str],
    pub(super) local_rank: &'static [&'static str],
    pub(super) local_size: &'static [&'static str],
    /// The number of machines.
    pub(super) machines: &'static [&'static str],
    /// Variables that together identify the job, and have the same values on all its ranks.
    pub(super) job: &'static [&'static str],
}

pub(super) const LAUNCHERS: [Launcher; 6] = [
    Launcher {
        name: TORCHRUN,
        rank: "RANK",
        world_size: &["WORLD_SIZE"],
        local_rank: &[LOCAL_RANK],
        local_size: &["LOCAL_WORLD_SIZE"],
        machines: &[],
        job: &[],
    },
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        machines: &[],
        job: &["PMIX_NAMESPACE"],
    },
    Launcher {
        name: "MVAPICH",
        rank: "MV2_COMM_WORLD_RANK",
        world_size: &["MV2_COMM_WORLD_SIZE"],
        local_rank: &["MV2_COMM_WORLD_LOCAL_RANK"],
        local_size: &["MV2_COMM_WORLD_LOCAL_SIZE"],
        machines: &[],
        job: &[],
    },
    Launcher {
        name: PMI,
        rank: "PMI_RANK",
        world_size: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
        local_size: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
        machines: &[],
        job: &[],
    },
    // flux-environment(7).
    Launcher {
        name: "Flux",
        rank: FLUX_RANK,
        world_size: &["FLUX_JOB_SIZE"],
        local_rank: &["FLUX_TASK_LOCAL_ID"],
        local_size: &[],
        machines: &["FLUX_JOB_NNODES"],
        job: &["FLUX_JOB_ID"],
    },
    Launcher {
        name: SLURM,
        rank: "SLURM_PROCID",
        // In the shell of an interactive step, `SLURM_NTASKS` is the job's number of tasks.
        world_size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_rank: &["SLURM_LOCALID"],
        local_size: &["SLURM_NTASKS_PER_NODE"],
        machines: &["SLURM_STEP_NUM_NODES", "SLURM_NNODES"],
        job: &[SLURM_JOB, SLURM_STEP],
    },
];

pub(super) const TORCHRUN: &str = "torchrun";
pub(super) const PMI: &str = "PMI";
pub(super) const SLURM: &str = "Slurm";

pub(super) const SLURM_JOB: &str = "SLURM_JOB_ID";

/// The number of a step within a Slurm job. Slurm sets it in the tasks that srun starts, but not in the
/// batch script, whose step has no number (slurmstepd's `setup_env`).
pub(super) const SLURM_STEP: &str = "SLURM_STEP_ID";

/// Step numbers from here on do not stand for tasks of srun, but for the shell of `salloc` (`SLURM_INTERACTIVE_STEP` of
/// slurm.h), the batch script, or processes that were started by ssh.
pub(super) const SLURM_NO_STEP: u32 = 0xFFFF_FFF0;

/// A task's number among all tasks of its Flux job.
pub(super) const FLUX_RANK: &str = "FLUX_TASK_RANK";

pub(super) const LOCAL_RANK: &str = "LOCAL_RANK";
