//! Where the built examples are.

use std::path::{Path, PathBuf};

/// The example of that name, which cargo builds beside the tests.
pub(crate) fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the test has a path");
    let target = test
        .parent()
        .and_then(Path::parent)
        .expect("tests lie in target/PROFILE/deps");
    let program = target.join("examples").join(name);
    assert!(
        program.is_file(),
        "build {} first: cargo build --example {name}",
        program.display()
    );
    program
}
