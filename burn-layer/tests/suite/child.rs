//! Tests in processes of their own.

use std::process::Command;

/// Whether this is the process that runs all tests. Then `test` has passed in one of its own, made as `prepare` says;
/// otherwise this is that one.
pub(crate) fn of(test: &str, prepare: impl FnOnce(&mut Command)) -> bool {
    const CHILD: &str = "BURN_TEST_CHILD";
    if std::env::var_os(CHILD).is_some() {
        return false;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, "1");
    prepare(&mut command);
    let child = command.output().unwrap();
    let out = String::from_utf8_lossy(&child.stdout);
    let err = String::from_utf8_lossy(&child.stderr);
    assert!(out.contains("1 passed"), "{out}{err}");
    assert!(child.status.success(), "{out}{err}");
    true
}
