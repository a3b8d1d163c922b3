//! How Burn's client is configured, which is settled once a process.

use super::child;
use burn::tensor::{Device, Tensor};
use burn_layer::{Layer, Layers};
use burn_std::config::{BurnConfig, RuntimeConfig};

#[derive(Debug)]
struct Nothing;
impl Layer for Nothing {}

/// Ops in a frame, once a layered device has computed.
fn ops_in_a_frame() -> usize {
    let device = Layers::on(Device::flex()).layer(Nothing).serve().unwrap();
    let mut x = Tensor::<1>::ones([2], &device);
    for _ in 0..100 {
        x = x.add_scalar(1);
    }
    assert_eq!(x.into_data().try_to_vec::<f32>().unwrap(), [101.0; 2]);
    BurnConfig::get().remote().flush_threshold
}

#[test]
fn frames_are_larger_than_burns() {
    let empty = tempfile::tempdir().unwrap();
    let in_an_empty_folder = |command: &mut std::process::Command| {
        command.current_dir(&empty);
    };
    if child::of(
        "suite::frames::frames_are_larger_than_burns",
        in_an_empty_folder,
    ) {
        return;
    }
    assert_eq!(ops_in_a_frame(), 32);
    // And Burn's client collects no ops in graphs.
    assert_eq!(BurnConfig::get().fusion().max_graph_size, Some(0));
}

/// Whether a process in a folder with that `burn.toml` has that many ops in a frame.
fn settles(test: &str, file: &str, ops: usize) -> bool {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("burn.toml"), file).unwrap();
    let there = |command: &mut std::process::Command| {
        command.current_dir(&folder);
    };
    if child::of(test, there) {
        return false;
    }
    assert_eq!(ops_in_a_frame(), ops);
    true
}

#[test]
fn a_file_of_the_program_settles_it() {
    let file = "[remote]\nflush_threshold = 7\n[fusion]\nmax_graph_size = 9\nbeam_search = { max_blocks = 3 }\n";
    if settles("suite::frames::a_file_of_the_program_settles_it", file, 7) {
        let config = BurnConfig::get();
        assert_eq!(config.fusion().beam_search.max_blocks, 3);
        // Layered devices cannot do with graphs.
        assert_eq!(config.fusion().max_graph_size, Some(0));
    }
}

/// Also where it says what Burn has anyway.
#[test]
fn a_file_with_burns_own_number_settles_it() {
    let test = "suite::frames::a_file_with_burns_own_number_settles_it";
    settles(test, "[remote]\nflush_threshold = 4\n", 4);
}

/// And not where it is about something else.
#[test]
fn a_file_about_something_else_settles_nothing() {
    let test = "suite::frames::a_file_about_something_else_settles_nothing";
    settles(test, "[remote]\nflush_bytes_threshold = 4096\n", 32);
}

#[test]
fn so_does_the_program() {
    if child::of("suite::frames::so_does_the_program", |_| {}) {
        return;
    }
    BurnConfig::set(BurnConfig::default());
    assert_eq!(
        ops_in_a_frame(),
        BurnConfig::default().remote().flush_threshold
    );
    assert_eq!(BurnConfig::get().fusion().max_graph_size, Some(0));
}
