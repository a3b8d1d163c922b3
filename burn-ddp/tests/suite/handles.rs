//! Handles of a group: their time limits, and the group of one.

use std::{thread, time::Duration};

use burn_ddp::{DdpError, ProcessGroup, ReduceOp};

use crate::suite::ranks::{impatiently, locally, meeting_place, over_tcp, start};

#[test]
fn a_group_of_one_can_be_called_off() {
    let group = ProcessGroup::single();
    let duplicate = group.duplicate().unwrap();
    assert!(group.fault().is_none());
    let mean = group.all_reduce(&mut [1i32], ReduceOp::Mean);
    assert!(matches!(mean, Err(DdpError::InvalidArgument(_))));
    group.abort("the disk is full");
    group.abort("and the next");
    for group in [group, duplicate] {
        let fault = group.fault().unwrap().to_string();
        assert_eq!(fault, "rank 0 aborted: the disk is full");
        assert_eq!(group.barrier().unwrap_err().to_string(), fault);
        assert!(group.duplicate().is_err() && group.subgroup(&[0]).is_err());
    }
    // One rank of several, by itself.
    let body = |group: ProcessGroup| {
        let own = match group.subgroup(&[1]) {
            Ok(own) => own,
            // Rank 1 was done before this one.
            Err(fault) if group.rank() != 1 => return fault.to_string(),
            Err(fault) => panic!("{fault}"),
        };
        if let Some(own) = own {
            own.duplicate().unwrap().abort("the disk is full");
            assert!(own.barrier().is_err());
        }
        group.barrier().unwrap_err().to_string()
    };
    for text in [over_tcp(3, 1, body), locally(3, body)].concat() {
        assert_eq!(text, "rank 1 aborted: the disk is full");
    }
}

#[test]
fn handles_have_time_limits_of_their_own() {
    let minute = Duration::from_secs(60);
    let ends = impatiently(2, |group| {
        assert_eq!(group.timeout(), Duration::from_secs(1));
        let patient = group.with_timeout(minute);
        // What is made from it, as it.
        let patient = patient
            .duplicate()
            .unwrap()
            .subgroup(&[1, 0])
            .unwrap()
            .unwrap();
        assert_eq!(patient.timeout(), minute);
        assert_eq!(group.duplicate().unwrap().timeout(), group.timeout());
        if group.rank() == 1 {
            thread::sleep(Duration::from_millis(1500));
        }
        patient.barrier().unwrap();
        group.with_timeout(Duration::MAX).barrier().unwrap();
        if group.rank() == 1 {
            thread::sleep(Duration::from_millis(1500));
        }
        group
            .with_timeout(Duration::from_millis(200))
            .barrier()
            .unwrap_err()
    });
    for end in ends {
        assert!(
            matches!(&end, DdpError::Timeout { ranks, after, .. }
                if ranks == &[1] && *after == Duration::from_millis(200)),
            "{end}"
        );
    }
    // A limit that is none.
    let (_folder, url) = meeting_place();
    thread::scope(|scope| {
        for rank in [0, 1] {
            let url = &url;
            scope.spawn(move || {
                let builder = ProcessGroup::builder().timeout(Duration::MAX);
                builder.connect(url, rank, 2).unwrap().barrier().unwrap();
            });
        }
    });
    for set in [
        || drop(ProcessGroup::builder().timeout(Duration::ZERO)),
        || drop(ProcessGroup::single().with_timeout(Duration::ZERO)),
    ] as [fn(); 2]
    {
        assert!(std::panic::catch_unwind(set).is_err());
    }
}

#[test]
fn the_environment_names_the_place_and_the_time_limit() {
    let (_folder, url) = meeting_place();
    for rank in start("environment", 2, &url, 7.5) {
        let output = rank.succeed(60);
        assert!(output.contains("RESULT ok 7.5s 7.5s 1"), "{output}");
    }
}
