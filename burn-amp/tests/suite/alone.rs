//! Tests that draw random numbers.

use std::{env, process::Command};

/// Runs `body`, the body of `test`, in a process of its own: Flex has one random number generator
/// a process, and the draws of other tests would come between.
pub(super) fn alone(test: &str, body: impl FnOnce()) {
    const ALONE: &str = "BURN_AMP_TEST_ALONE";
    if env::var_os(ALONE).is_some() {
        return body();
    }
    let program = env::current_exe().expect("the test has a path");
    let output = Command::new(program)
        .args(["--exact", test])
        .env(ALONE, "1")
        .output()
        .expect("the test starts");
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(printed.contains("1 passed"), "{printed}");
}
