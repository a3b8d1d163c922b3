//! How many ranks a machine gets, where that is not given as a number.

use std::{collections::HashSet, env, fs, path::Path, thread};

use crate::DdpError;

/// The number of ranks on this machine that `text` asks for, by the names of torchrun's `--nproc-per-node`: a number; `gpu`,
/// one for each of NVIDIA's GPUs that this process may use (`/dev/nvidia*`, and of those what `CUDA_VISIBLE_DEVICES` leaves);
/// `cpu`, one for each core; or `auto`, which is `gpu` if there are GPUs, and `cpu` otherwise.
///
/// ```
/// use burn_ddp::launch::nproc;
///
/// assert_eq!(nproc("4")?, 4);
/// assert!(nproc("auto")? >= 1);
/// assert!(nproc("all").is_err());
/// # Ok::<(), burn_ddp::DdpError>(())
/// ```
///
/// # Errors
///
/// [`DdpError::InvalidArgument`] for other text, and for `gpu` where there is none.
pub fn nproc(text: &str) -> Result<usize, DdpError> {
    let visible = env::var("CUDA_VISIBLE_DEVICES").ok();
    resolve(text, gpus(Path::new("/dev"), visible.as_deref()))
}

fn resolve(text: &str, gpus: usize) -> Result<usize, DdpError> {
    let cores = || thread::available_parallelism().map_or(1, usize::from);
    match (text, gpus) {
        ("gpu", 0) => Err(DdpError::InvalidArgument(
            "`gpu` asks for a rank per NVIDIA GPU, and none is visible (no /dev/nvidia0 or other, or hidden by \
             CUDA_VISIBLE_DEVICES); give a number"
                .into(),
        )),
        ("cpu", _) | ("auto", 0) => Ok(cores()),
        ("gpu" | "auto", gpus) => Ok(gpus),
        (number, _) => number.parse().map_err(|_| {
            DdpError::InvalidArgument(format!(
                "{text} ranks; expected a number, gpu, cpu or auto"
            ))
        }),
    }
}

/// The GPUs with a device file in `devices` that `visible`, CUDA_VISIBLE_DEVICES, leaves to a process.
fn gpus(devices: &Path, visible: Option<&str>) -> usize {
    let entries = fs::read_dir(devices).into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| {
        let name = entry.file_name();
        name.to_str()?.strip_prefix("nvidia")?.parse::<usize>().ok()
    });
    let count = numbers.count();
    match visible {
        None => count,
        Some(visible) => chosen(visible, count),
    }
}

/// How many of `count` GPUs a list leaves: CUDA ignores what follows an entry that is none of them, and with a GPU that is
/// listed twice there are none. Of MIG instances, a process sees one.
fn chosen(visible: &str, count: usize) -> usize {
    let visible = visible.trim_start();
    if visible.starts_with("MIG-") {
        return count.min(1);
    }
    let by_uuid = visible.starts_with("GPU-");
    let mut seen = HashSet::new();
    for entry in visible.split(',').map(str::trim) {
        let is_gpu = match by_uuid {
            true => entry.starts_with("GPU-"),
            false => entry.parse().is_ok_and(|index: usize| index < count),
        };
        if !is_gpu {
            break;
        }
        if !seen.insert(entry) {
            return 0;
        }
    }
    seen.len().min(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Over 4 GPUs, as PyTorch's `torch.cuda.device_count` counts; of MIG instances, as NVIDIA's guide says.
    #[test]
    fn a_list_leaves_the_gpus_that_cuda_sees() {
        let cases = [
            ("", 0),
            ("0", 1),
            ("0,1,2,3", 4),
            (" 3 , 1 ", 2),
            ("-1", 0),
            ("NoDevFiles", 0),
            ("0,1,-1,2", 2),
            ("0,4,1", 1),
            ("1,2,1", 0),
            ("GPU-9b1c,GPU-24d7", 2),
            ("0,GPU-9b1c", 1),
            ("MIG-89cd,MIG-90ef", 1),
        ];
        for (visible, expected) in cases {
            assert_eq!(chosen(visible, 4), expected, "{visible:?}");
        }
    }

    #[test]
    fn gpus_are_those_with_a_device_file() {
        let folder = tempfile::tempdir().unwrap();
        for name in [
            "nvidia0",
            "nvidia1",
            "nvidia10",
            "nvidiactl",
            "nvidia-uvm",
            "null",
        ] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        assert_eq!(gpus(folder.path(), None), 3);
        assert_eq!(gpus(folder.path(), Some("1,0")), 2);
        assert_eq!(gpus(&folder.path().join("missing"), None), 0);
        assert_eq!(gpus(&folder.path().join("missing"), Some("0")), 0);
    }

    #[test]
    fn names_stand_for_numbers() {
        let cores = thread::available_parallelism().unwrap().get();
        for (text, gpus, expected) in [
            ("3", 8, 3),
            ("gpu", 8, 8),
            ("auto", 8, 8),
            ("cpu", 8, cores),
            ("auto", 0, cores),
        ] {
            assert_eq!(
                resolve(text, gpus).unwrap(),
                expected,
                "{text}, {gpus} GPUs"
            );
        }
        let error = resolve("gpu", 0).unwrap_err().to_string();
        assert!(error.contains("none is visible"), "{error}");
        for text in ["", "-1", "gpus", "1.5"] {
            let error = resolve(text, 8).unwrap_err().to_string();
            assert!(
                error.contains("expected a number, gpu, cpu or auto"),
                "{error}"
            );
        }
    }
}
