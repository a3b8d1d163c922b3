//! Finds the built examples.

use std::path::{Path, PathBuf};

/// The path of an example, which cargo builds together with the tests.
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
