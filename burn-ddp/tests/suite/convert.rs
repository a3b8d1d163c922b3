//! Models converted from `BatchNorm` to `SyncBatchNorm`.

use burn::{
    module::Module,
    nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig},
    store::ModuleRecord,
    tensor::{Device, Distribution, Tensor},
};
use burn_ddp::{Norm, ProcessGroup, SyncBatchNorm, ToSyncBatchNorm, to_sync_batch_norm};

use crate::suite::ranks::locally;

#[derive(Module, Debug)]
struct Block<N: Norm> {
    linear: Linear,
    norm: N,
}

to_sync_batch_norm!(Block { convert: norm; keep: linear });

#[derive(Module, Debug)]
struct Net<N: Norm> {
    blocks: Vec<Block<N>>,
    pair: [N; 2],
    last: Option<N>,
    none: Option<N>,
    scale: f64,
}

to_sync_batch_norm!(Net {
    convert: blocks, pair, last, none;
    keep: scale,
});

impl<N: Norm> Net<N> {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.blocks.iter().fold(x, |x, block| {
            block.norm.forward(block.linear.forward(x)).tanh()
        });
        let norms = self.pair.iter().chain(&self.last);
        norms.fold(x, |x, norm| norm.forward(x).exp()) * self.scale
    }
}

fn net(device: &Device) -> Net<BatchNorm> {
    let norm = || BatchNormConfig::new(3).init(device);
    let block = || Block {
        linear: LinearConfig::new(3, 3).init(device),
        norm: norm(),
    };
    Net {
        blocks: vec![block(), block()],
        pair: [norm(), norm()],
        last: Some(norm()),
        none: None,
        scale: 2.0,
    }
}

fn values(tensor: Tensor<2>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

#[test]
fn a_whole_model_is_converted() {
    let device = Device::flex().autodiff();
    let batch = Tensor::<2>::random([8, 3], Distribution::Default, &device);
    let plain = net(&device);
    // Running statistics that are not those of a new norm.
    plain.forward(batch.clone());
    plain.forward(batch.clone() * 2.0);
    let bytes = |record: ModuleRecord| record.into_bytes().unwrap().to_vec();
    let record = bytes(plain.valid().into_record());

    let synchronized: Net<SyncBatchNorm> =
        plain.clone().to_sync_batch_norm(&ProcessGroup::single());
    assert_eq!(bytes(synchronized.valid().into_record()), record);
    let held_out = batch.clone().inner();
    assert_eq!(
        values(synchronized.valid().forward(held_out.clone())),
        values(plain.valid().forward(held_out))
    );

    // In training, two ranks with half of the batch each do what one does with all of it.
    let expected = values(plain.forward(batch.clone()));
    let batch = batch.into_data();
    let halves = locally(2, |group| {
        let device = Device::flex().autodiff();
        let record = ModuleRecord::from_bytes(burn::tensor::Bytes::from_bytes_vec(record.clone()));
        let net = net(&device).load_record(record.unwrap());
        let net = net.to_sync_batch_norm(&group);
        let own = group.rank() * 4..(group.rank() + 1) * 4;
        let batch = Tensor::<2>::from_data(batch.clone(), &device);
        values(net.forward(batch.slice(own)))
    });
    for (actual, expected) in halves.concat().iter().zip(&expected) {
        assert!(
            (actual - expected).abs() < 1e-4 * expected.abs(),
            "{actual} {expected}"
        );
    }
}

#[test]
fn a_norm_that_was_a_batch_norm_has_no_other_ranks_until_it_is_given_some() {
    let device = Device::flex().autodiff();
    let norm = BatchNormConfig::new(3).init(&device);
    let from = SyncBatchNorm::from(norm.clone());
    let images = Tensor::<2>::random([6, 3], Distribution::Default, &device);
    let expected = norm.forward(images.clone()).into_data();
    assert_eq!(from.forward(images.clone()).into_data(), expected);
    assert_eq!(BatchNorm::from(from.clone()).gamma.id, norm.gamma.id);
    // Half of the batch on each of two ranks.
    let halves = locally(2, |group| {
        let norm = SyncBatchNorm::from(BatchNormConfig::new(3).init(&device));
        let rows = 3 * group.rank()..3 * group.rank() + 3;
        let half = norm
            .with_group(&group)
            .forward(images.clone().slice([rows]));
        half.into_data().try_to_vec::<f32>().unwrap()
    });
    let expected: Vec<f32> = expected.try_to_vec().unwrap();
    for (found, expected) in halves.concat().iter().zip(expected) {
        assert!((found - expected).abs() < 1e-5, "{found} {expected}");
    }
}
