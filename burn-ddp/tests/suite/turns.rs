//! Calls of several threads on one communicator: each has its turn.

use std::{thread, time::Duration};

use burn::{
    nn::BatchNormConfig,
    tensor::{Device, Distribution, Tensor},
};
use burn_ddp::{
    DdpError, Pending, ProcessGroup, ReduceOp, SyncBatchNorm, TensorOp, with_custom_ops,
};
use burn_layer::{Inputs, Layer, Layers, Op, Plan};

use crate::suite::ranks::{impatiently, locally, over_tcp};

#[test]
fn threads_may_submit_at_the_same_time() {
    let body = |group: ProcessGroup| {
        let submit = || -> Vec<Pending<Vec<i64>>> {
            let sum = |_| group.all_reduce_async(vec![1i64], ReduceOp::Sum);
            (0..500).map(sum).collect()
        };
        let pending: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(submit)).collect();
            let pending = threads.into_iter().map(|thread| thread.join().unwrap());
            pending.flatten().collect()
        });
        for sum in pending {
            assert_eq!(sum.wait().unwrap(), [2]);
        }
    };
    locally(2, body);
    over_tcp(2, 1, body);
}

/// A loss behind a `SyncBatchNorm` that communicates over the same group, from within its device.
fn loss(group: &ProcessGroup) -> Tensor<1> {
    /// Absolute values take a while: the loss is handed to the group before the norm's turn comes.
    #[derive(Debug)]
    struct Slow;

    impl Layer for Slow {
        fn plan(&self, op: Op, _inputs: &Inputs) -> Option<Plan> {
            if op == Op::float_abs {
                thread::sleep(Duration::from_millis(300));
            }
            None
        }
    }

    let layers = Layers::on(Device::flex()).layer(Slow);
    let device = with_custom_ops(layers).serve().unwrap().autodiff();
    let norm = SyncBatchNorm::new(&BatchNormConfig::new(3).init(&device), group);
    let x = Tensor::<4>::random([8, 3, 16, 16], Distribution::Default, &device);
    norm.forward(x.abs()).square().mean()
}

#[test]
fn what_makes_a_tensor_has_its_turn_before_the_call_over_it() {
    let losses = over_tcp(2, 1, |group| {
        let mean = TensorOp::AllReduce(ReduceOp::Mean);
        let loss = group.collective(mean, loss(&group)).unwrap();
        loss.into_scalar::<f32>()
    });
    for loss in losses {
        assert!((loss - 1.0).abs() < 1e-3, "{loss}");
    }
}

/// An asynchronous call has its place when it is submitted.
#[test]
fn calls_that_wait_for_each_other_end_with_an_error() {
    let ends = impatiently(2, |group| {
        let mean = TensorOp::AllReduce(ReduceOp::Mean);
        let pending = group.collective_async(mean, loss(&group)).unwrap();
        let end = pending.wait().unwrap_err();
        assert!(group.fault().is_some());
        end
    });
    for end in ends {
        let DdpError::Timeout { ranks, why, .. } = &end else {
            panic!("{end}");
        };
        assert_eq!(ranks.len(), 1);
        assert!(why.contains("an earlier call of this rank"), "{end}");
    }
}
