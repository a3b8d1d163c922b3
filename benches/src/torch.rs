//! Runs the same jobs in PyTorch.

use std::{path::PathBuf, process::Command};

/// The command that runs a script of `benches/torch`. The script is found from the working directory, which is the
/// repository's root or, under cargo, that of this crate.
///
/// ```
/// let command = benches::torch_script("steps.py");
/// assert_eq!(command.get_program(), "python3");
/// assert!(std::path::Path::new(command.get_args().next().unwrap()).exists());
/// ```
pub fn torch_script(name: &str) -> Command {
    let inside = PathBuf::from("torch").join(name);
    let script = if inside.exists() {
        inside
    } else {
        PathBuf::from("benches").join(inside)
    };
    let mut command = Command::new("python3");
    command.arg(script);
    command
}
