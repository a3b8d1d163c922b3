//! Which rank the launcher names where one fails and all end.

use std::time::Duration;

use burn_ddp::ProcessGroup;

use crate::suite::launch::{failed, play, spawn};

/// What ranks of these tests do; whether this process is one.
pub(crate) fn played(scenario: &str) -> bool {
    let fails: fn(ProcessGroup) = match scenario {
        // As `main` does that returns an error.
        "fails in main" => |group| {
            drop(group);
            std::process::exit(7);
        },
        "fails by a panic" => |_group| panic!("on purpose"),
        "fails by an abort" => |group| {
            group.abort("on purpose");
            drop(group);
            std::process::exit(7);
        },
        _ => return false,
    };
    let group = ProcessGroup::init().unwrap();
    group.barrier().unwrap();
    if group.rank() == 1 {
        fails(group);
        return true;
    }
    group.barrier().unwrap_err();
    drop(group);
    std::process::exit(3)
}

/// It tells the others before it ends, and these may end before it does. None of them has the first or the last
/// number.
#[test]
fn the_rank_that_failed_first_is_named_however_fast_the_others_end() {
    for (scenario, status) in [
        ("fails in main", 7),
        // The code that Rust's test harness ends with.
        ("fails by a panic", 101),
        ("fails by an abort", 7),
    ] {
        for _ in 0..12 {
            let options = play(scenario)
                // So that nobody takes the failures of ranks for this test's.
                .prefix_output(true)
                .grace(Duration::from_secs(10));
            assert_eq!(failed(spawn(3, options)), (1, Some(status)), "{scenario}");
        }
    }
}
