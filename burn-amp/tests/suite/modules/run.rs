//! [`Run`]: a module forward and backward.

use super::feed::{Feed, Weights};
use burn::{
    module::{Module, ModuleVisitor, Param},
    store::ModuleRecord,
    tensor::{DType, Device, Gradients, Tensor},
};

/// Where a module runs, and how it came there.
pub(super) enum Start {
    /// On a plain device, moved from plain Flex.
    Plain(Device),
    /// On an autocast device, moved from plain Flex.
    Forked(Device),
    /// On an autocast device, loaded from a record of plain Flex.
    Loaded(Device),
}

/// What came of a module forward and backward.
pub(super) struct Run {
    shape: Vec<usize>,
    output: Vec<f32>,
    /// By path.
    parameters: Vec<(String, Vec<f32>)>,
    /// By path, then those of the inputs.
    gradients: Vec<(String, Vec<f32>)>,
}

impl Run {
    pub(super) fn new<M: Module, const D: usize>(
        start: &Start,
        init: impl Fn(&Device) -> M,
        forward: impl Fn(&M, &Feed) -> Tensor<D>,
    ) -> Self {
        let plain = || init(&Device::flex().autodiff()).map(&mut Weights::default());
        let (model, device) = match start {
            Start::Plain(device) | Start::Forked(device) => (plain().fork(device), device.clone()),
            Start::Loaded(device) => {
                let record = plain().into_record().into_bytes().expect("a record");
                let record = ModuleRecord::from_bytes(record).expect("the record's bytes");
                let model = init(&device.clone().autodiff()).load_record(record);
                (model, device.clone())
            }
        };
        let device = device.autodiff();
        device.seed(7);
        let feed = Feed::new(device);
        let output = forward(&model, &feed);
        assert_eq!(output.dtype(), DType::F32);
        let weights = feed.target(output.dims());
        let grads = (output.clone() * weights).sum().backward();

        let mut seen = Parameters {
            grads: &grads,
            path: Vec::new(),
            values: Vec::new(),
            gradients: Vec::new(),
        };
        model.visit(&mut seen);
        let mut gradients = seen.gradients;
        for (index, gradient) in feed.gradients(&grads).into_iter().enumerate() {
            let name = format!("input {index}");
            gradients.push((name, gradient.expect("every input has a gradient")));
        }
        Self {
            shape: output.dims().to_vec(),
            output: values(output),
            parameters: seen.values,
            gradients,
        }
    }

    /// How far every tensor is from `exact`, as a share of its norm.
    pub(super) fn distances(&self, exact: &Self, vanishing: &[&str]) -> Vec<(String, f32)> {
        assert_eq!(self.shape, exact.shape);
        assert_eq!(self.parameters, exact.parameters, "the weights came along");
        assert_eq!(self.gradients.len(), exact.gradients.len());
        for path in vanishing {
            let found = exact.gradients.iter().any(|(exact, _)| exact == path);
            assert!(found, "{path} is no parameter");
        }
        let largest = exact.gradients.iter().map(|(_, gradient)| norm(gradient));
        let largest = largest.fold(0.0, f32::max);

        let output = distance(&self.output, &exact.output) / norm(&exact.output);
        let mut distances = vec![("the output".to_owned(), output)];
        for ((path, low), (exact_path, exact)) in self.gradients.iter().zip(&exact.gradients) {
            assert_eq!(path, exact_path);
            let scale = if vanishing.contains(&path.as_str()) {
                largest
            } else {
                norm(exact)
            };
            let off = distance(low, exact) / scale;
            distances.push((format!("the gradient of {path}"), off));
        }
        distances
    }
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor
        .into_data()
        .try_to_vec()
        .expect("the program sees f32")
}

fn norm(values: &[f32]) -> f32 {
    values.iter().map(|value| value * value).sum::<f32>().sqrt()
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let difference: Vec<f32> = a.iter().zip(b).map(|(a, b)| a - b).collect();
    norm(&difference)
}

struct Parameters<'a> {
    grads: &'a Gradients,
    path: Vec<String>,
    values: Vec<(String, Vec<f32>)>,
    gradients: Vec<(String, Vec<f32>)>,
}

impl ModuleVisitor for Parameters<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        let tensor = param.val();
        if tensor.is_require_grad() {
            let gradient = tensor.grad(self.grads);
            let gradient = gradient.unwrap_or_else(|| panic!("{path} has no gradient"));
            self.gradients.push((path.clone(), values(gradient)));
        }
        self.values.push((path, values(tensor)));
    }
}
