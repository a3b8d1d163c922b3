//! The bucketer: gradients in any order, averages in theirs.

use std::sync::Arc;

use burn::tensor::DType;
use burn_ddp::{Average, BucketSizes, Bucketer, DdpError, ProcessGroup, Slot, Values};
use half::bf16;
use rand::{SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;

use crate::ranks::locally;

const SIZES: BucketSizes = BucketSizes {
    first: 100,
    others: 400,
};

/// Gradients of `f32`s.
pub(crate) fn slots(lens: &[usize]) -> Vec<Slot> {
    let slot = |len: &usize| Slot {
        len: *len,
        dtype: DType::F32,
    };
    lens.iter().map(slot).collect()
}

#[test]
fn gradients_may_come_in_any_order_on_each_rank() {
    let lens = [3, 40, 0, 500, 7, 1, 90, 90, 90, 2];
    locally(3, |group| {
        let rank = group.rank();
        let mut bucketer = Bucketer::new(group, slots(&lens), SIZES, Arc::new(Average));
        assert!(bucketer.len() > 3 && !bucketer.is_empty());
        assert!(bucketer.bytes() >= lens.iter().sum::<usize>() * 4);
        for round in 0..10 {
            let mut order: Vec<usize> = (0..lens.len()).collect();
            order.shuffle(&mut ChaCha8Rng::seed_from_u64(round * 3 + rank as u64));
            for slot in order {
                let value = (rank * 10 + slot) as f32;
                let missing = slot == 4 || (slot == 6 && rank != 1);
                let gradient = (!missing).then(|| Values::F32(vec![value; lens[slot]]));
                bucketer.submit(slot, gradient).unwrap();
            }
            for (slot, average) in bucketer.finish().unwrap().into_iter().enumerate() {
                let expected = match slot {
                    4 => None,
                    6 => Some(16.0 / 3.0),
                    slot => Some(10.0 + slot as f32),
                };
                assert_eq!(
                    average,
                    expected.map(|it| Values::F32(vec![it; lens[slot]]))
                );
            }
        }
    });
}

#[test]
fn types_that_alternate_have_a_bucket_each() {
    let slot = |index: usize| Slot {
        len: 5,
        dtype: match index % 3 {
            0 => DType::BF16,
            1 => DType::F32,
            _ => DType::F64,
        },
    };
    let slots: Vec<Slot> = (0..30).map(slot).collect();
    let sizes = |bytes: usize| BucketSizes {
        first: bytes,
        others: bytes,
    };
    // 10 gradients of each type: 100, 200 and 400 bytes.
    for (bytes, buckets) in [(400, 3), (200, 4), (100, 8), (1, 30)] {
        locally(2, |group| {
            let rank = group.rank();
            let hook = Arc::new(Average);
            let mut bucketer = Bucketer::new(group, slots.clone(), sizes(bytes), hook);
            assert_eq!((bucketer.len(), bucketer.bytes()), (buckets, 700));
            let values = |slot: usize, value: f64| {
                let values = Values::F64(vec![value; 5]);
                values.cast(slots[slot].dtype).unwrap()
            };
            for slot in 0..30 {
                let value = (rank * 2 + slot) as f64;
                bucketer.submit(slot, Some(values(slot, value))).unwrap();
            }
            for (slot, average) in bucketer.finish().unwrap().into_iter().enumerate() {
                assert_eq!(average, Some(values(slot, slot as f64 + 1.0)));
            }
        });
    }
}

#[test]
fn types_do_not_share_buckets() {
    locally(2, |group| {
        let dtypes = [DType::F32, DType::BF16, DType::F64, DType::F64];
        let slots = dtypes.map(|dtype| Slot { len: 2, dtype }).to_vec();
        let mut bucketer = Bucketer::new(group.clone(), slots, SIZES, Arc::new(Average));
        assert_eq!(bucketer.len(), 3);
        let value = group.rank() as f64;
        let third = 1.0 / 3.0 + value;
        bucketer
            .submit(0, Some(Values::F32(vec![value as f32; 2])))
            .unwrap();
        bucketer
            .submit(1, Some(Values::BF16(vec![bf16::from_f64(value); 2])))
            .unwrap();
        bucketer
            .submit(2, Some(Values::F64(vec![third; 2])))
            .unwrap();
        bucketer.submit(3, None).unwrap();
        let expected = [
            Some(Values::F32(vec![0.5; 2])),
            Some(Values::BF16(vec![bf16::from_f32(0.5); 2])),
            Some(Values::F64(vec![(1.0 / 3.0 + (1.0 / 3.0 + 1.0)) / 2.0; 2])),
            None,
        ];
        assert_eq!(bucketer.finish().unwrap(), expected);
    });
}

#[test]
fn mistakes_are_refused() {
    let mut bucketer = Bucketer::new(
        ProcessGroup::single(),
        slots(&[2, 2]),
        SIZES,
        Arc::new(Average),
    );
    let is_refused =
        |result: Result<(), DdpError>| matches!(result, Err(DdpError::InvalidArgument(_)));
    assert!(is_refused(
        bucketer.submit(0, Some(Values::F32(vec![0.0; 3])))
    ));
    assert!(is_refused(
        bucketer.submit(0, Some(Values::F64(vec![0.0; 2])))
    ));
    assert!(is_refused(bucketer.submit(2, None)));
    bucketer.submit(0, None).unwrap();
    assert!(is_refused(bucketer.submit(0, None)));
    assert!(is_refused(bucketer.finish().map(drop)));
    // The next round starts afresh.
    bucketer.submit(0, None).unwrap();
    bucketer.submit(1, None).unwrap();
    assert!(is_refused(bucketer.submit(1, None)));
    assert_eq!(bucketer.finish().unwrap(), [None, None]);
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
