//! The operation on an autodiff backend: a single node of the graph, whatever the inner backend.

use burn::backend::{
    Autodiff, AutodiffBackend, Backend,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    tensor::FloatTensor,
};

use super::backends::SyncBatchNormOps;
use crate::ProcessGroup;

#[derive(Debug)]
struct SyncBatchNormBackward;

/// The state that the forward pass saves for the backward pass.
#[derive(Clone, Debug)]
struct Saved<B: Backend> {
    x: FloatTensor<B>,
    gamma: FloatTensor<B>,
    mean: FloatTensor<B>,
    variance: FloatTensor<B>,
    /// The model and its handle may be gone when backward runs. It is none of the program's handles, for a panic before backward is
    /// noticed when those are dropped.
    group: ProcessGroup,
    epsilon: f64,
}

impl<B: SyncBatchNormOps> Backward<B, 3> for SyncBatchNormBackward {
    type State = Saved<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let grad = grads.consume::<B>(&ops.node);
        let Saved {
            x,
            gamma,
            mean,
            variance,
            group,
            epsilon,
        } = ops.state;
        let (x, gamma, beta) =
            B::sync_batch_norm_backward(x, gamma, mean, variance, grad, group, epsilon);
        for (parent, grad) in ops.parents.into_iter().zip([x, gamma, beta]) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}

impl<B: SyncBatchNormOps, C: CheckpointStrategy> SyncBatchNormOps for Autodiff<B, C> {
    fn sync_batch_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        group: ProcessGroup,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let parents = [x.node(), gamma.node(), beta.node()];
        let (x, gamma, beta) = (
            x.into_primitive(),
            gamma.into_primitive(),
            beta.into_primitive(),
        );
        let (output, mean, variance) =
            B::sync_batch_norm(x.clone(), gamma.clone(), beta, group.clone(), epsilon);
        // Compute bound: must not be computed again in backward, where the other ranks would not take part.
        let output = match SyncBatchNormBackward
            .prepare::<C>(parents)
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => {
                let saved = Saved {
                    x,
                    gamma,
                    mean: mean.clone(),
                    variance: variance.clone(),
                    group: group.for_a_call(),
                    epsilon,
                };
                prep.finish(saved, output)
            }
            OpsKind::UnTracked(prep) => prep.finish(output),
        };
        (
            output,
            <Self as AutodiffBackend>::from_inner(mean),
            <Self as AutodiffBackend>::from_inner(variance),
        )
    }

    fn sync_batch_norm_backward(
        _x: FloatTensor<Self>,
        _gamma: FloatTensor<Self>,
        _mean: FloatTensor<Self>,
        _variance: FloatTensor<Self>,
        _grad: FloatTensor<Self>,
        _group: ProcessGroup,
        _epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        panic!("the backward pass of a synchronized batch normalization cannot be differentiated");
    }
}
