//! The command `burn-ddp`: starts the ranks of a job, or predicts how a training scales to more ranks.

use std::{
    ffi::OsString,
    io::{self, Write},
    process::ExitCode,
    time::Duration,
};

use burn_ddp::{
    DdpError,
    launch::{self, LaunchOptions},
    simulate::{self, AllReduce, Network, Step},
};
use clap::{Args, Parser, Subcommand};

/// Data parallel training for Burn.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Start several ranks of a program and wait for them.
    Run(Run),
    /// Estimate step times and efficiency for 8 to 4,096 ranks.
    Simulate(Simulate),
}

#[derive(Args)]
struct Run {
    /// Number of ranks to start on this machine, or gpu (one for each NVIDIA GPU), cpu (one for each core) or auto
    /// (gpu if there are any, otherwise cpu).
    #[arg(
        short,
        long = "nproc-per-node",
        alias = "nproc_per_node",
        default_value = "1"
    )]
    n: String,
    /// Number of machines; run this command on each of them.
    #[arg(long, default_value_t = 1)]
    nnodes: usize,
    /// Number of this machine, from 0.
    #[arg(long, alias = "node_rank", default_value_t = 0)]
    node_rank: usize,
    /// HOST:PORT where rank 0 listens. Required for several machines.
    #[arg(long, conflicts_with_all = ["master_addr", "master_port"])]
    master: Option<String>,
    /// The HOST of --master by itself.
    #[arg(long, alias = "master_addr", value_name = "HOST")]
    master_addr: Option<String>,
    /// The PORT of --master by itself (29500 if only --master-addr is given).
    #[arg(long, alias = "master_port", value_name = "PORT")]
    master_port: Option<u16>,
    /// Seconds until the other ranks are ended after one has failed.
    #[arg(long, default_value_t = 5.0)]
    grace: f64,
    /// Seconds that the ranks have to end, and to save a checkpoint, when a signal (Ctrl-C, SIGTERM) asks them to.
    /// Then they are killed; a second signal kills them at once.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0)]
    stop_grace: f64,
    /// Number of times to restart all ranks after one has failed. The environment variable
    /// RESTART_COUNT tells the ranks how often they were restarted.
    #[arg(long, alias = "max_restarts", default_value_t = 0)]
    max_restarts: usize,
    /// Print output lines without their rank.
    #[arg(long)]
    no_prefix: bool,
    /// Program to start, and its arguments.
    #[arg(value_name = "PROGRAM", trailing_var_arg = true, required = true)]
    command: Vec<OsString>,
}

impl Run {
    /// Where rank 0 listens, if the arguments say so.
    fn master(&self) -> Result<Option<(String, u16)>, DdpError> {
        if let Some(master) = &self.master {
            let parts = master.rsplit_once(':');
            let parts = parts.and_then(|(host, port)| Some((host.to_owned(), port.parse().ok()?)));
            return match parts {
                Some(parts) => Ok(Some(parts)),
                None => Err(invalid(format!("--master {master}; expected HOST:PORT"))),
            };
        }
        match (&self.master_addr, self.master_port) {
            (None, None) => Ok(None),
            // torchrun's defaults.
            (Some(host), port) => Ok(Some((host.clone(), port.unwrap_or(29500)))),
            (None, Some(port)) if self.nnodes == 1 => Ok(Some(("127.0.0.1".to_owned(), port))),
            (None, Some(_)) => Err(invalid(format!(
                "--master-port on {} machines needs --master-addr, the host of rank 0",
                self.nnodes
            ))),
        }
    }
}

#[derive(Args)]
struct Simulate {
    /// Compute time of a step on a single rank, in milliseconds.
    #[arg(long, default_value_t = 250.0)]
    compute_ms: f64,
    /// Size of all gradients, in megabytes.
    #[arg(long, default_value_t = 100.0)]
    gradient_mb: f64,
    /// Size of a bucket of gradients, in megabytes.
    #[arg(long, default_value_t = 25.0)]
    bucket_mb: f64,
    /// Latency of a message between machines, in microseconds.
    #[arg(long, default_value_t = 10.0)]
    latency_us: f64,
    /// Bandwidth of a machine, in gigabits per second.
    #[arg(long, default_value_t = 100.0)]
    gbit: f64,
    /// Ranks per machine, for the hierarchical all-reduce.
    #[arg(long, default_value_t = 8)]
    per_machine: usize,
    /// Latency of a message within a machine, in microseconds.
    #[arg(long, default_value_t = 3.0)]
    inside_latency_us: f64,
    /// Bandwidth of a rank within its machine, in gigabits per second.
    #[arg(long, default_value_t = 2400.0)]
    inside_gbit: f64,
    /// Send gradients after backward, not during it.
    #[arg(long)]
    no_overlap: bool,
    /// Measure messages and all-reduces of 2, 3 and 4 ranks on this machine, and compare the all-reduces with
    /// their predicted times. Ignores the other options.
    #[arg(long)]
    calibrate: bool,
}

fn invalid(problem: String) -> DdpError {
    DdpError::InvalidArgument(problem)
}

fn run(run: Run) -> Result<(), DdpError> {
    if run.node_rank >= run.nnodes {
        return Err(invalid(format!(
            "--node-rank {}; expected less than --nnodes, {}",
            run.node_rank, run.nnodes
        )));
    }
    let (program, arguments) = run.command.split_first().expect("clap requires one");
    let seconds = |option: &str, seconds: f64| {
        Duration::try_from_secs_f64(seconds)
            .map_err(|error| invalid(format!("{option} {seconds}: {error}")))
    };
    let mut options = LaunchOptions::new()
        .arguments(arguments)
        .nodes(run.nnodes, run.node_rank)
        .prefix_output(!run.no_prefix)
        .grace(seconds("--grace", run.grace)?)
        .stop_grace(seconds("--stop-grace", run.stop_grace)?)
        .max_restarts(run.max_restarts);
    if let Some((host, port)) = run.master()? {
        options = options.master(host, port);
    }
    launch::spawn(program, launch::nproc(&run.n)?, options)
}

/// Prints a table of measured and predicted times.
fn calibrate() -> Result<(), DdpError> {
    println!(
        "{:>6}{:>12}{:>12}{:>14}{:>14}{:>8}",
        "ranks", "algorithm", "bytes", "measured", "predicted", "ratio"
    );
    for ranks in 2..=4 {
        let sizes = [1 << 10, 40 << 10, 1 << 20, 8 << 20];
        let calibration = simulate::calibrate(ranks, &sizes, 20)?;
        for case in calibration.cases {
            let algorithm = format!("{:?}", case.algorithm).to_lowercase();
            println!(
                "{ranks:>6}{algorithm:>12}{:>12}{:>11.1} us{:>11.1} us{:>8.2}",
                case.bytes,
                case.measured * 1e6,
                case.predicted * 1e6,
                case.predicted / case.measured
            );
        }
        let Network { latency, bandwidth } = calibration.network;
        let quiet = calibration.quiet;
        println!(
            "{ranks:>6} ranks: alpha {:.1} us, 1/beta {:.2} GB/s; two alone: alpha {:.1} us, 1/beta {:.2} GB/s",
            latency * 1e6,
            bandwidth / 1e9,
            quiet.latency * 1e6,
            quiet.bandwidth / 1e9
        );
    }
    Ok(())
}

fn simulate(simulate: Simulate) -> Result<(), DdpError> {
    if simulate.calibrate {
        return calibrate();
    }
    let positive = |name: &str, value: f64| match value.is_finite() && value > 0.0 {
        true => Ok(value),
        false => Err(invalid(format!("--{name} {value}; expected more than 0"))),
    };
    let network = |latency_us: f64, gbit: f64| Network {
        latency: latency_us * 1e-6,
        bandwidth: gbit * 1e9 / 8.0,
    };
    let compute = positive("compute-ms", simulate.compute_ms)?;
    let gradients = positive("gradient-mb", simulate.gradient_mb)?;
    let bucket = (positive("bucket-mb", simulate.bucket_mb)? * 1e6).max(1.0) as u64;
    // Each bucket is a call, in each of the steps that are computed.
    if gradients * 1e6 / bucket as f64 > 1e6 {
        return Err(invalid(format!(
            "--bucket-mb {}; expected a millionth of --gradient-mb or more",
            simulate.bucket_mb
        )));
    }
    let between = network(
        positive("latency-us", simulate.latency_us)?,
        positive("gbit", simulate.gbit)?,
    );
    let inside = network(
        positive("inside-latency-us", simulate.inside_latency_us)?,
        positive("inside-gbit", simulate.inside_gbit)?,
    );
    let per_machine = simulate.per_machine;
    if !(1..=8).contains(&per_machine) || !per_machine.is_power_of_two() {
        return Err(invalid(format!(
            "--per-machine {per_machine}; expected 1, 2, 4 or 8"
        )));
    }
    let compute = Duration::try_from_secs_f64(compute / 1e3)
        .map_err(|error| invalid(format!("--compute-ms {compute}: {error}")))?;
    let step = Step::new(compute, (gradients * 1e6) as u64)
        .buckets(bucket.min(1 << 20), bucket)
        .overlap(!simulate.no_overlap);
    let hierarchical = AllReduce::Hierarchical {
        per_machine,
        inside,
    };
    println!(
        "{:>6}{:>22}{:>22}{:>22}",
        "ranks", "ring", "tree", "hierarchical"
    );
    for ranks in (3..=12).map(|power| 1 << power) {
        print!("{ranks:>6}");
        for algorithm in [AllReduce::Ring, AllReduce::Tree, hierarchical] {
            let all_reduce = |bytes| algorithm.seconds(between, ranks, bytes);
            let milliseconds = step.seconds(all_reduce) * 1e3;
            let percent = step.efficiency(all_reduce) * 1e2;
            print!("{milliseconds:>11.1} ms {percent:>5.1} %");
        }
        println!();
    }
    Ok(())
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Action::Run(arguments) => run(arguments),
        Action::Simulate(arguments) => simulate(arguments),
    };
    let Err(error) = result else {
        return ExitCode::SUCCESS;
    };
    // Whoever reads it may have closed it, and the code says it too.
    let _ = writeln!(io::stderr(), "burn-ddp: {error}");
    match error {
        DdpError::RankFailed { code, .. } => {
            let code = code.and_then(|code| u8::try_from(code).ok());
            ExitCode::from(code.unwrap_or(1))
        }
        _ => ExitCode::from(2),
    }
}
