//! Buckets of gradients that a test makes up.

use std::sync::{Arc, Mutex};

use burn::{
    module::{Module, Param},
    optim::GradientsParams,
    tensor::{DType, Device, FloatDType, Tensor},
};
use burn_ddp::{
    Average, CommHook, Ddp, DdpConfig, DdpError, DdpStats, GradientBucket, ProcessGroup, Values,
};

use crate::suite::ranks::locally;

#[derive(Module, Debug)]
struct Parameters {
    parameters: Vec<Param<Tensor<1>>>,
}

/// Averages gradients of parameters that are numbered in the order in which buckets take them: the last
/// parameter first.
pub(crate) struct Rounds {
    ddp: Ddp,
    model: Parameters,
}

impl Rounds {
    /// For gradients of some lengths and types.
    pub(crate) fn new(
        group: &ProcessGroup,
        slots: &[(usize, FloatDType)],
        config: DdpConfig,
    ) -> Self {
        let device = Device::flex().autodiff();
        let parameter = |(len, dtype): &(usize, FloatDType)| {
            Param::from_tensor(Tensor::<1>::zeros([*len], (&device, DType::from(*dtype))))
        };
        let model = Parameters {
            parameters: slots.iter().rev().map(parameter).collect(),
        };
        let ddp = Ddp::new(group, config, &model).unwrap();
        Self { ddp, model }
    }

    /// One round, in which this rank may lack gradients.
    pub(crate) fn average(
        &mut self,
        gradients: Vec<Option<Values>>,
    ) -> Result<Vec<Option<Values>>, DdpError> {
        let device = Device::flex();
        let slots = || self.model.parameters.iter().rev();
        let mut given = GradientsParams::new();
        for (parameter, gradient) in slots().zip(gradients) {
            if let Some(values) = gradient {
                let (len, dtype) = (values.len(), values.dtype());
                let data = values.into_data([len].into(), dtype);
                given.register(parameter.id, Tensor::<1>::from_data(data, (&device, dtype)));
            }
        }
        let averages = self.ddp.reduce_gradients(given, &self.model)?;
        let values = slots().map(|parameter| {
            let average = averages.get::<1>(parameter.id)?;
            Some(Values::from_data(average.into_data()).unwrap())
        });
        Ok(values.collect())
    }

    pub(crate) fn stats(&self) -> DdpStats {
        self.ddp.stats()
    }
}

/// Gradients of `f32`s.
pub(crate) fn floats(lens: &[usize]) -> Vec<(usize, FloatDType)> {
    lens.iter().map(|len| (*len, FloatDType::F32)).collect()
}

pub(crate) fn sizes(first: usize, others: usize) -> DdpConfig {
    DdpConfig::new()
        .first_bucket_bytes(first)
        .bucket_bytes(others)
}

#[test]
fn types_that_alternate_have_a_bucket_each() {
    let dtype = |slot: usize| [FloatDType::BF16, FloatDType::F32, FloatDType::F64][slot % 3];
    let slots: Vec<(usize, FloatDType)> = (0..30).map(|slot| (5, dtype(slot))).collect();
    // 10 gradients of each type: 100, 200 and 400 bytes.
    for (bytes, buckets) in [(400, 3), (200, 4), (100, 7), (1, 30)] {
        locally(2, |group| {
            let rank = group.rank();
            let mut rounds = Rounds::new(&group, &slots, sizes(bytes, bytes));
            let values = |slot: usize, value: usize| {
                let values = Values::F64(vec![value as f64; 5]);
                Some(values.cast(dtype(slot).into()).unwrap())
            };
            let own = |slot| values(slot, rank * 2 + slot);
            let averages = rounds.average((0..30).map(own).collect()).unwrap();
            for (slot, average) in averages.into_iter().enumerate() {
                assert_eq!(average, values(slot, slot + 1));
            }
            // And a flag for each gradient.
            let stats = rounds.stats();
            assert_eq!((stats.buckets, stats.bytes_reduced), (buckets, 700 + 30));
        });
    }
}

/// Notes how many elements each bucket has.
#[derive(Clone, Debug, Default)]
struct Noting(Arc<Mutex<Vec<usize>>>);

impl CommHook for Noting {
    fn average(&self, group: &ProcessGroup, bucket: GradientBucket) -> Result<Values, DdpError> {
        self.0.lock().unwrap().push(bucket.values.len());
        Average.average(group, bucket)
    }
}

#[test]
fn by_default_the_first_bucket_has_1_mib_and_the_others_have_25() {
    // 256 KiB each.
    let lens = [1 << 16; 4 + 2 * 100 + 1];
    locally(2, |group| {
        let noting = Noting::default();
        let config = DdpConfig::default().hook(noting.clone());
        let mut rounds = Rounds::new(&group, &floats(&lens), config);
        let own = lens.map(|len| Some(Values::F32(vec![1.0; len])));
        rounds.average(own.into()).unwrap();
        let mib = (1 << 20) / 4;
        let expected = [mib, 25 * mib, 25 * mib, 1 << 16];
        assert_eq!(*noting.0.lock().unwrap(), expected);
    });
}

/// As `compute_bucket_assignment_by_size` of PyTorch's reducer: a gradient is added, and then a bucket that has its size is closed.
#[test]
fn a_bucket_is_sent_with_the_gradient_that_fills_it() {
    // With a first bucket of 2 elements, and others of 6.
    for (lens, expected) in [
        (&[1, 3, 4, 4, 2][..], &[4, 8, 2][..]),
        (&[9, 5, 9, 6, 1], &[9, 14, 6, 1]),
        (&[1], &[1]),
    ] {
        locally(2, |group| {
            let noting = Noting::default();
            let mut rounds = Rounds::new(&group, &floats(lens), sizes(8, 24).hook(noting.clone()));
            let own = lens.iter().map(|&len| Some(Values::F32(vec![1.0; len])));
            rounds.average(own.collect()).unwrap();
            assert_eq!(*noting.0.lock().unwrap(), expected);
        });
    }
}

#[test]
fn a_gradient_of_another_shape_or_type_ends_the_job() {
    for (wrong, said) in [
        (Values::F32(vec![0.0; 3]), "3 elements of type F32"),
        (Values::F64(vec![0.0; 2]), "2 elements of type F64"),
    ] {
        for error in locally(2, |group| {
            let mut rounds = Rounds::new(&group, &floats(&[2, 2]), DdpConfig::new());
            let mut own = vec![Some(Values::F32(vec![0.0; 2])); 2];
            if group.rank() == 1 {
                own[0] = Some(wrong.clone());
            }
            let end = rounds.average(own).unwrap_err();
            // Nor is a second try told something else.
            let again = rounds.average(vec![None, None]).unwrap_err();
            assert_eq!(again.to_string(), end.to_string());
            end
        }) {
            let DdpError::Aborted { rank: 1, reason } = &error else {
                panic!("{error}");
            };
            assert!(reason.contains("the gradient of `parameters.1`"), "{error}");
            let expected = format!("{said}; expected 2 of type F32");
            assert!(reason.contains(&expected), "{error}");
        }
    }
}

#[test]
fn values_convert() {
    let zeros = Values::zeros(3, DType::F16).unwrap();
    assert_eq!(
        (zeros.len(), zeros.is_empty(), zeros.dtype()),
        (3, false, DType::F16)
    );
    assert!(Values::zeros(3, DType::I32).is_err());
    let values = Values::F32(vec![1.0, 2.0]);
    let data = values.clone().into_data([2, 1].into(), DType::F64);
    assert_eq!(data.as_slice::<f64>().unwrap(), [1.0, 2.0]);
    assert_eq!(
        Values::from_data(data).unwrap(),
        Values::F64(vec![1.0, 2.0])
    );
}
