//! Communication hooks: what they get, what comes of what they return, and what when they fail.

use std::sync::{Arc, Mutex};

use burn::{
    nn::LinearConfig,
    optim::{GradientsParams, SgdConfig},
    tensor::{DType, Device, Shape, Tensor},
};
use burn_ddp::{
    Average, CommHook, Compression, Ddp, DdpConfig, DdpError, GradientBucket, ProcessGroup,
    ReduceOp, Values,
};
use half::{bf16, f16};

use crate::suite::{
    buckets::{Rounds, floats, sizes},
    overlapped::layered,
    ranks::{all_succeed, locally},
};

/// One round over gradients of rank times slot, as f32.
fn round(rounds: &mut Rounds, gradients: &[Vec<f32>]) -> Result<Vec<Vec<f32>>, DdpError> {
    let gradients = gradients.iter().cloned();
    let averages = rounds.average(gradients.map(|it| Some(Values::F32(it))).collect())?;
    let values = averages.into_iter().map(|average| match average {
        Some(Values::F32(values)) => values,
        other => panic!("{other:?}"),
    });
    Ok(values.collect())
}

/// The buckets' numbers, and the shapes of the gradients in them.
type Notes = Arc<Mutex<Vec<(usize, Vec<Shape>)>>>;

/// The sum, and a note of what came by.
#[derive(Debug)]
struct Noted(Notes);

impl CommHook for Noted {
    fn average(&self, group: &ProcessGroup, bucket: GradientBucket) -> Result<Values, DdpError> {
        self.0.lock().unwrap().push((bucket.index, bucket.shapes));
        let mut values = bucket.values;
        values.all_reduce(group, ReduceOp::Sum)?;
        Ok(values)
    }
}

#[test]
fn a_hook_gets_every_bucket_in_order_and_decides_what_comes_back() {
    locally(3, |group| {
        let rank = group.rank();
        let notes = Notes::default();
        let config = sizes(8, 24).hook(Noted(notes.clone()));
        let mut rounds = Rounds::new(&group, &floats(&[2, 4, 2, 7, 1]), config);
        for step in 0..2 {
            let gradients: Vec<Vec<f32>> = [2, 4, 2, 7, 1]
                .iter()
                .enumerate()
                .map(|(slot, len)| vec![(rank * 10 + slot + step) as f32; *len])
                .collect();
            let sums = round(&mut rounds, &gradients).unwrap();
            for (slot, sum) in sums.iter().enumerate() {
                assert!(sum.iter().all(|it| *it == (30 + 3 * (slot + step)) as f32));
            }
        }
        // 2 numbers fill a bucket of 8 bytes, and 6 fill one of 24.
        let step: [(usize, &[usize]); 4] = [(0, &[2]), (1, &[4, 2]), (2, &[7]), (3, &[1])];
        let expected =
            step.map(|(index, lens)| (index, lens.iter().map(|&len| Shape::new([len])).collect()));
        let expected: Vec<(usize, Vec<Shape>)> = [expected.clone(), expected].concat();
        let noted = notes.lock().unwrap();
        assert_eq!(*noted, expected);
    });
}

#[test]
fn a_hook_sees_the_shapes_of_parameters() {
    let device = Device::flex().autodiff();
    let model = LinearConfig::new(2, 3).init(&device);
    let notes = Notes::default();
    let config = DdpConfig::new().hook(Noted(notes.clone()));
    let mut ddp = Ddp::new(&ProcessGroup::single(), config, &model).unwrap();
    let loss = model.forward(Tensor::<2>::ones([1, 2], &device)).sum();
    let gradients = GradientsParams::from_grads(loss.backward(), &model);
    ddp.reduce_gradients(gradients, &model).unwrap();
    // The last parameter comes first.
    let shapes = vec![Shape::new([3]), Shape::new([2, 3])];
    assert_eq!(*notes.lock().unwrap(), [(0, shapes)]);
}

/// Halves gradients, whatever the number of ranks.
#[derive(Debug)]
pub(crate) struct Halved;

impl CommHook for Halved {
    fn average(&self, group: &ProcessGroup, bucket: GradientBucket) -> Result<Values, DdpError> {
        let mut values = Average.average(group, bucket)?;
        values.scale(0.5);
        Ok(values)
    }
}

#[test]
fn a_rank_that_is_alone_has_its_hook_too() {
    let gradients = [vec![1.0, 3.0], vec![-5.0]];
    let slots = floats(&[2, 1]);
    let averages = |config: DdpConfig| {
        let mut rounds = Rounds::new(&ProcessGroup::single(), &slots, config);
        let averages = [0; 2].map(|_| round(&mut rounds, &gradients).unwrap());
        (averages, rounds.stats().steps)
    };
    let halves = vec![vec![0.5, 1.5], vec![-2.5]];
    let halved = averages(DdpConfig::new().hook(Halved));
    assert_eq!(halved, ([halves.clone(), halves], 2));
    // Nothing is to be done.
    let same = gradients.to_vec();
    assert_eq!(averages(DdpConfig::new()), ([same.clone(), same], 0));
}

/// Played by a process, since it needs a layered device of its own.
pub(crate) fn alone_when_overlapped(group: &ProcessGroup) -> Result<(), DdpError> {
    let (device, overlap) = layered(group, DdpConfig::new().hook(Halved))?;
    let model = LinearConfig::new(2, 1).init(&device);
    let mut ddp = Ddp::overlapped(group, overlap, &model)?;
    let mut model = ddp.broadcast_parameters(model)?;
    let mut optimizer = SgdConfig::new().init();
    for step in 1..=2 {
        let input = Tensor::<2>::full([1, 2], 4.0, &device);
        let gradients = GradientsParams::from_grads(model.forward(input).sum().backward(), &model);
        let gradients = ddp.reduce_gradients(gradients, &model)?;
        let weight = gradients.get::<2>(model.weight.id).unwrap();
        assert_eq!(weight.into_data().try_to_vec::<f32>().unwrap(), [2.0; 2]);
        assert_eq!(ddp.stats().steps, step);
        model = optimizer.step(0.1, model, gradients);
    }
    Ok(())
}

#[test]
fn a_rank_that_is_alone_has_its_hook_on_a_layered_device() {
    for output in all_succeed("overlapped hook", 1) {
        assert!(!output.contains("are not marked"), "{output}");
    }
}

#[test]
fn compression_rounds_once_on_the_way_and_once_after() {
    let value = |rank: usize, index: usize| ((rank * 31 + index) as f32 * 0.7).sin();
    for compression in [Compression::BF16, Compression::F16] {
        let rounded = |value: f32| match compression {
            Compression::BF16 => bf16::from_f32(value).to_f32(),
            Compression::F16 => f16::from_f32(value).to_f32(),
        };
        locally(3, |group| {
            let rank = group.rank();
            let config = DdpConfig::new().compression(compression);
            let mut rounds = Rounds::new(&group, &floats(&[50]), config);
            let gradient = (0..50).map(|index| value(rank, index)).collect();
            let averages = round(&mut rounds, &[gradient]).unwrap();
            for (index, average) in averages[0].iter().enumerate() {
                let sum: f32 = (0..3).map(|rank| rounded(value(rank, index))).sum();
                assert_eq!(*average, rounded(sum / 3.0));
            }
        });
    }
    // Other types are averaged as they are.
    locally(2, |group| {
        let values = Values::F64(vec![1.0 + group.rank() as f64 / 3.0]);
        let bucket = GradientBucket {
            index: 0,
            values,
            shapes: vec![Shape::new([1])],
        };
        let plain = Average.average(&group, bucket.clone()).unwrap();
        assert_eq!(plain, Values::F64(vec![(1.0 + (1.0 + 1.0 / 3.0)) / 2.0]));
        assert_eq!(Compression::F16.average(&group, bucket).unwrap(), plain);
    });
}

/// Misbehaves on rank 1.
#[derive(Clone, Copy, Debug)]
enum Broken {
    Error,
    Panic,
    Short,
    Type,
}

impl CommHook for Broken {
    fn average(&self, group: &ProcessGroup, bucket: GradientBucket) -> Result<Values, DdpError> {
        if group.rank() != 1 {
            return Average.average(group, bucket);
        }
        match self {
            Self::Error => Err(DdpError::Device("on purpose".into())),
            Self::Panic => panic!("on purpose"),
            Self::Short => Ok(Values::F32(vec![0.0])),
            Self::Type => bucket.values.cast(DType::F64),
        }
    }
}

#[test]
fn a_hook_that_fails_ends_the_job_everywhere() {
    for (hook, said) in [
        (Broken::Error, "on purpose"),
        (Broken::Panic, "Panic panicked: on purpose"),
        (Broken::Short, "returned 1 values of type F32; expected 3"),
        (
            Broken::Type,
            "returned 3 values of type F64; expected 3 of type F32",
        ),
    ] {
        for error in locally(3, |group| {
            let config = DdpConfig::new().hook(hook);
            let mut rounds = Rounds::new(&group, &floats(&[3]), config);
            round(&mut rounds, &[vec![1.0; 3]]).unwrap_err()
        }) {
            let DdpError::Aborted { rank: 1, reason } = &error else {
                panic!("{error}");
            };
            assert!(reason.contains(said), "{reason}");
        }
    }
}

#[test]
fn values_are_cast_and_scaled() {
    let exact = Values::F32(vec![1.0, -2.5, 65536.0]);
    for dtype in [DType::F64, DType::BF16, DType::F32] {
        let cast = exact.clone().cast(dtype).unwrap();
        assert_eq!(cast.dtype(), dtype);
        assert_eq!(cast.cast(DType::F32).unwrap(), exact);
    }
    let cast = exact.clone().cast(DType::F16).unwrap();
    assert_eq!(
        cast,
        Values::F16(vec![f16::from_f32(1.0), f16::from_f32(-2.5), f16::INFINITY])
    );
    assert!(exact.cast(DType::I32).is_err());
    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        let mut values = Values::F32(vec![2.0, -3.0]).cast(dtype).unwrap();
        values.scale(1.5);
        assert_eq!(
            values.cast(DType::F32).unwrap(),
            Values::F32(vec![3.0, -4.5])
        );
    }
}
