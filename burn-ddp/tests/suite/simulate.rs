//! The cost model against its formulas, and against rings and trees played message by message.

use std::{process::Command, time::Duration};

use burn_ddp::simulate::{AllReduce, Network, Step, calibrate};

const NETWORK: Network = Network {
    latency: 10e-6,
    bandwidth: 12.5e9,
};

fn assert_close(a: f64, b: f64) {
    assert!((a - b).abs() <= 1e-9 * a.abs().max(b.abs()), "{a} {b}");
}

/// A ring all-reduce, message by message: a rank forwards a share when it has it and its link is free.
fn play_ring(network: Network, ranks: usize, bytes: f64) -> f64 {
    let message = network.message(bytes / ranks as f64);
    let mut has = vec![0.0f64; ranks];
    let mut free = vec![0.0f64; ranks];
    for _ in 0..2 * (ranks - 1) {
        let mut next = vec![0.0; ranks];
        for rank in 0..ranks {
            free[rank] = has[rank].max(free[rank]) + message;
            next[(rank + 1) % ranks] = free[rank];
        }
        has = next;
    }
    has.into_iter().fold(0.0, f64::max)
}

/// A binomial tree, message by message: up to rank 0 and down again. Each rank sends or receives one
/// message at a time.
fn play_tree(network: Network, ranks: usize, bytes: f64) -> f64 {
    let message = network.message(bytes);
    let children = |rank: usize| {
        let bits = if rank == 0 { 20 } else { rank.trailing_zeros() };
        (0..bits)
            .map(move |bit| rank + (1 << bit))
            .filter(move |child| *child < ranks)
    };
    // Children have higher numbers than their parent.
    let mut up = vec![0.0f64; ranks];
    for rank in (0..ranks).rev() {
        for child in children(rank) {
            up[rank] = up[rank].max(up[child]) + message;
        }
    }
    let mut down = vec![0.0f64; ranks];
    down[0] = up[0];
    for rank in 0..ranks {
        let mut free = down[rank];
        let nearest_first: Vec<usize> = children(rank).collect();
        for child in nearest_first.into_iter().rev() {
            free += message;
            down[child] = free;
        }
    }
    down.into_iter().fold(0.0, f64::max)
}

#[test]
fn costs_are_those_of_the_literature() {
    // 1 us a message, 1 GB/s, 12 MB: in microseconds.
    let network = Network {
        latency: 1e-6,
        bandwidth: 1e9,
    };
    let bytes = 12_000_000;
    let assert_takes = |algorithm: AllReduce, ranks: usize, microseconds: f64| {
        assert_close(
            algorithm.seconds(network, ranks, bytes),
            microseconds * 1e-6,
        );
    };
    // Patarasuk and Yuan 2009: 2 (N - 1) messages of S / N.
    for (ranks, microseconds) in [
        (2, 2.0 + 12_000.0),
        (3, 4.0 + 16_000.0),
        (4, 6.0 + 18_000.0),
        (8, 14.0 + 21_000.0),
        (12, 22.0 + 22_000.0),
    ] {
        assert_takes(AllReduce::Ring, ranks, microseconds);
    }
    // Thakur, Rabenseifner and Gropp 2005: a binomial tree has ceil(lg N) rounds, for the reduction and for
    // the broadcast.
    for (ranks, rounds) in [
        (2, 1),
        (3, 2),
        (4, 2),
        (5, 3),
        (8, 3),
        (9, 4),
        (1000, 10),
        (4096, 12),
    ] {
        assert_takes(AllReduce::Tree, ranks, f64::from(2 * rounds) * 12_001.0);
    }
    // Machines of 4, in which messages take 0.1 us and 10 GB/s: 3 rounds of a quarter, twice, and a ring over
    // the machines, in which each machine sends the whole.
    let hierarchical = AllReduce::Hierarchical {
        per_machine: 4,
        inside: Network {
            latency: 1e-7,
            bandwidth: 1e10,
        },
    };
    for (ranks, between) in [
        (4, 0.0),
        (8, 2.0 + 12_000.0),
        (12, 4.0 + 16_000.0),
        (16, 6.0 + 18_000.0),
    ] {
        assert_takes(hierarchical, ranks, 6.0 * (0.1 + 300.0) + between);
    }
}

#[test]
fn rings_and_trees_take_as_long_as_when_played() {
    for ranks in 1..=17 {
        for bytes in [1u64, 1_000, 25_000_000] {
            let ring = AllReduce::Ring.seconds(NETWORK, ranks, bytes);
            assert_close(ring, play_ring(NETWORK, ranks, bytes as f64));
            let tree = AllReduce::Tree.seconds(NETWORK, ranks, bytes);
            assert_close(tree, play_tree(NETWORK, ranks, bytes as f64));
        }
    }
}

#[test]
fn a_hierarchy_is_a_ring_of_rings() {
    let inside = Network {
        latency: 3e-6,
        bandwidth: 300e9,
    };
    let seconds = |per_machine, ranks| {
        let hierarchical = AllReduce::Hierarchical {
            per_machine,
            inside,
        };
        hierarchical.seconds(NETWORK, ranks, 25_000_000)
    };
    // One machine, and machines of one rank.
    assert_close(
        seconds(8, 8),
        AllReduce::Ring.seconds(inside, 8, 25_000_000),
    );
    assert_close(
        seconds(1, 8),
        AllReduce::Ring.seconds(NETWORK, 8, 25_000_000),
    );
    // 2 machines of 4: each rank's quarter goes around a ring of 2, over a quarter of the link.
    let quarter = Network {
        bandwidth: 12.5e9 / 4.0,
        ..NETWORK
    };
    let expected = play_ring(inside, 4, 25e6) + play_ring(quarter, 2, 25e6 / 4.0);
    assert_close(seconds(4, 8), expected);
    // Fewer messages in a row than a ring of all ranks.
    let ring = AllReduce::Ring.seconds(NETWORK, 4096, 1 << 20);
    assert!(seconds(8, 4096) < ring);
}

#[test]
#[should_panic(expected = "12 ranks are no multiple of 8 a machine")]
fn machines_come_out_even() {
    let hierarchical = AllReduce::Hierarchical {
        per_machine: 8,
        inside: NETWORK,
    };
    hierarchical.seconds(NETWORK, 12, 1);
}

#[test]
fn steps_hide_what_backward_leaves_time_for() {
    // 3 s of computing, of which backward makes 100 bytes from 1 s on.
    let step = Step::new(Duration::from_secs(3), 100).buckets(20, 40);
    assert_eq!(step.seconds(|_| 0.0), 3.0);
    assert_eq!(step.efficiency(|_| 0.0), 1.0);
    // Buckets of 20, 40 and 40 bytes, full after 1.4, 2.2 and 3 s.
    assert_close(step.seconds(|bytes| bytes as f64 * 0.01), 3.4);
    assert_close(step.seconds(|bytes| bytes as f64 * 0.1), 1.4 + 10.0);
    assert_close(step.seconds(|_| 1.0), 4.4);
    assert_close(step.efficiency(|_| 1.0), 3.0 / 4.4);
    let after = step.overlap(false);
    assert_close(after.seconds(|bytes| bytes as f64 * 0.01), 4.0);
    assert_close(after.seconds(|_| 1.0), 6.0);
}

#[test]
fn the_command_prints_a_table() {
    let run = |arguments: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_burn-ddp"))
            .arg("simulate")
            .args(arguments)
            .output()
            .unwrap()
    };
    // One bucket that is sent after backward: 100 ms of computing, and one all-reduce.
    let output = run(&[
        "--compute-ms=100",
        "--gradient-mb=1",
        "--bucket-mb=100",
        "--no-overlap",
        "--latency-us=1001",
        "--gbit=8",
    ]);
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    let rows: Vec<Vec<&str>> = text
        .lines()
        .skip(1)
        .map(|line| line.split_whitespace().collect())
        .collect();
    let ranks: Vec<&str> = rows.iter().map(|row| row[0]).collect();
    let expected = [
        "8", "16", "32", "64", "128", "256", "512", "1024", "2048", "4096",
    ];
    assert_eq!(ranks, expected);
    // Ring of 8: 14 ms of latency, 1.75 ms of data. Tree: 6 messages of 2 ms.
    assert_eq!(rows[0][1..5], ["115.8", "ms", "86.4", "%"]);
    assert_eq!(rows[0][5..9], ["112.0", "ms", "89.3", "%"]);
    assert_eq!(run(&["--gbit=0"]).status.code(), Some(2));
    assert_eq!(run(&["--per-machine=3"]).status.code(), Some(2));
}

#[test]
fn direct_is_one_step_and_small_messages_take_it() {
    for ranks in [2, 3, 8] {
        let expected = 10e-6 + (ranks - 1) as f64 * 1000.0 / 12.5e9;
        assert_close(AllReduce::Direct.seconds(NETWORK, ranks, 1000), expected);
        assert_eq!(AllReduce::chosen(ranks, 1000), AllReduce::Direct);
        assert_eq!(
            AllReduce::chosen(ranks, 64 << 10).seconds(NETWORK, 1, 1),
            0.0
        );
        assert_eq!(AllReduce::chosen(ranks, 1 << 20), AllReduce::Ring);
    }
    // Two ranks send 64 KiB at once, and three not any more.
    assert_eq!(AllReduce::chosen(2, 64 << 10), AllReduce::Direct);
    assert_eq!(AllReduce::chosen(3, 64 << 10), AllReduce::Tree);
    assert_eq!(AllReduce::chosen(100, 1000), AllReduce::Tree);
}

/// The sum of squares of relative errors.
fn error(network: Network, messages: &[(f64, f64)]) -> f64 {
    let relative = |(bytes, seconds): &(f64, f64)| network.message(*bytes) / seconds - 1.0;
    messages.iter().map(|it| relative(it).powi(2)).sum()
}

#[test]
fn what_is_fitted_is_what_was_put_in() {
    let sizes = [64.0, 4e3, 3e4, 3e5, 1e6, 4e6];
    for latency in [1e-7, 30e-6, 2e-3] {
        for bandwidth in [1e7, 1.25e9, 4e11] {
            let network = Network { latency, bandwidth };
            let messages = sizes.map(|bytes| (bytes, network.message(bytes)));
            let fitted = Network::fit(&messages).unwrap();
            assert!((fitted.latency / latency - 1.0).abs() < 1e-6, "{fitted:?}");
            assert!(
                (fitted.bandwidth / bandwidth - 1.0).abs() < 1e-6,
                "{fitted:?}"
            );
        }
    }
}

#[test]
fn no_other_network_fits_better() {
    let network = Network {
        latency: 20e-6,
        bandwidth: 2e9,
    };
    let noisy = [64.0, 4e3, 3e4, 3e5, 1e6, 4e6].map(|bytes: f64| {
        let noise = 1.0 + 0.3 * (bytes * 1.7).sin();
        (bytes, network.message(bytes) * noise)
    });
    let fitted = Network::fit(&noisy).unwrap();
    assert!((fitted.latency / 20e-6 - 1.0).abs() < 0.4);
    let least = error(fitted, &noisy);
    for (slower, faster) in [(1.001, 1.0), (0.999, 1.0), (1.0, 1.001), (1.0, 0.999)] {
        let other = Network {
            latency: fitted.latency * slower,
            bandwidth: fitted.bandwidth * faster,
        };
        assert!(error(other, &noisy) > least);
    }
}

#[test]
fn times_that_no_network_has_give_the_nearest() {
    // Long messages that take less than in proportion to short ones: no latency below 0.
    let steep = Network::fit(&[(1e3, 1e-6), (1e6, 2e-3)]).unwrap();
    assert_eq!(steep.latency, 0.0);
    let least = error(steep, &[(1e3, 1e-6), (1e6, 2e-3)]);
    for factor in [0.99, 1.01] {
        let other = Network {
            bandwidth: steep.bandwidth * factor,
            ..steep
        };
        assert!(error(other, &[(1e3, 1e-6), (1e6, 2e-3)]) > least);
    }
    // Long ones that are faster than short ones.
    let flat = Network::fit(&[(1e3, 2e-6), (1e6, 1e-6)]).unwrap();
    assert_eq!(flat.message(1.0), flat.message(1e9));
    assert_eq!(Network::fit(&[(1e3, 1e-6), (1e3, 2e-6)]), None);
    assert_eq!(Network::fit(&[(1e3, 0.0), (1e6, 2e-6)]), None);
    assert_eq!(Network::fit(&[]), None);
}

#[test]
fn a_calibration_has_what_was_asked_for() {
    let sizes = [256, 40 << 10, 1 << 20];
    for ranks in [2, 3] {
        let calibration = calibrate(ranks, &sizes, 2).unwrap();
        assert_eq!(calibration.ranks, ranks);
        let bytes: Vec<u64> = calibration.cases.iter().map(|case| case.bytes).collect();
        assert_eq!(bytes, sizes);
        for Network { latency, bandwidth } in [calibration.network, calibration.quiet] {
            assert!(latency >= 0.0 && bandwidth > 0.0);
        }
        for case in calibration.cases {
            assert!(case.measured > 0.0);
            let network = match case.algorithm {
                AllReduce::Tree => calibration.quiet,
                _ => calibration.network,
            };
            let expected = case.algorithm.seconds(network, ranks, case.bytes);
            assert_eq!(case.predicted, expected);
            assert_eq!(case.algorithm, AllReduce::chosen(ranks, case.bytes));
        }
    }
    assert!(calibrate(1, &sizes, 2).is_err());
    assert!(calibrate(2, &sizes, 0).is_err());
}

#[test]
fn the_command_prints_measured_beside_predicted() {
    let output = Command::new(env!("CARGO_BIN_EXE_burn-ddp"))
        .args(["simulate", "--calibrate"])
        .output()
        .unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    for ranks in ["2", "3", "4"] {
        let rows = text
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>());
        let rows: Vec<Vec<&str>> = rows.filter(|row| row[0] == ranks).collect();
        let (network, cases) = rows.split_last().unwrap();
        assert!(network.contains(&"alpha"), "{text}");
        let bytes: Vec<&str> = cases.iter().map(|row| row[2]).collect();
        assert_eq!(bytes, ["1024", "40960", "1048576", "8388608"]);
        for row in cases {
            let number = |at: usize| row[at].parse::<f64>().unwrap();
            let (measured, predicted, ratio) = (number(3), number(5), number(7));
            // All three are rounded.
            assert!(measured > 0.0 && (predicted / measured - ratio).abs() < 0.05 * ratio + 0.01);
        }
    }
}
