//! Outputs of burn-train, sent and received.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_ddp::GatherOutput;
use burn_train::{
    ClassificationOutput, MultiLabelClassificationOutput, RegressionOutput, SequenceOutput,
};

fn data<const N: usize>(shape: [usize; N], dtype: DType) -> TensorData {
    let values: Vec<f32> = (0..shape.iter().product())
        .map(|it: usize| it as f32)
        .collect();
    TensorData::new(values, shape).convert_dtype(dtype)
}

#[test]
fn outputs_survive_the_journey() {
    let device = Device::flex();
    let loss = || Tensor::<1>::from_data(data([1], DType::F32), &device);
    let float = |shape: [usize; 2]| Tensor::<2>::from_data(data(shape, DType::F32), &device);
    let ints = || Tensor::<2, Int>::from_data(data([2, 3], DType::I32), (&device, DType::I32));
    fn journey<T: GatherOutput>(output: T, device: &Device) -> [Vec<TensorData>; 2] {
        let sent = output.into_parts().unwrap();
        let arrived = T::from_parts(sent.clone(), device).into_parts().unwrap();
        [sent, arrived]
    }
    let classes = Tensor::<1, Int>::from_data(data([2], DType::I64), (&device, DType::I64));
    let logits = || Tensor::<3>::from_data(data([2, 3, 4], DType::F32), &device);
    let journeys = [
        journey(
            ClassificationOutput::new(loss(), float([2, 3]), classes),
            &device,
        ),
        journey(
            MultiLabelClassificationOutput::new(loss(), float([2, 3]), ints()),
            &device,
        ),
        journey(
            RegressionOutput::new(loss(), float([2, 1]), float([2, 1])),
            &device,
        ),
        journey(SequenceOutput::new(loss(), logits(), None, ints()), &device),
        journey(
            SequenceOutput::new(loss(), logits(), Some(ints()), ints()),
            &device,
        ),
    ];
    let lens = journeys.each_ref().map(|[sent, _]| sent.len());
    assert_eq!(lens, [3, 3, 3, 3, 4]);
    for [sent, arrived] in journeys {
        assert_eq!(sent, arrived);
    }
    assert_eq!(journey((), &device), [vec![], vec![]]);
}
