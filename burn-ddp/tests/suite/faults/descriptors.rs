//! File descriptors that run out.

use crate::suite::ranks::{meeting_place, start};

#[test]
fn where_descriptors_run_out_the_limit_is_named() {
    // The one that listens, the one that calls.
    for scenario in ["few descriptors 0", "few descriptors 1"] {
        let (_folder, url) = meeting_place();
        for rank in start(scenario, 2, &url, 60.0) {
            let output = rank.fail(40);
            assert!(output.contains("ulimit -n"), "{scenario}: {output}");
        }
    }
}

#[test]
fn more_descriptors_are_taken_where_the_system_allows_it() {
    let (_folder, url) = meeting_place();
    for rank in start("a low limit of descriptors", 2, &url, 60.0) {
        let output = rank.succeed(60);
        assert!(output.contains("RESULT ok 2"), "{output}");
    }
}
