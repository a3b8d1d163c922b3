//! Plans of convolutions: which kernels compute one, as the library's heuristics advise.

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Name, cudnnBackendAttributeType_t as Type,
    cudnnBackendDescriptorType_t as Kind, cudnnBackendHeurMode_t as Mode,
    cudnnBackendNumericalNote_t::{
        CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC, CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION,
    },
    cudnnConvolutionMode_t::CUDNN_CROSS_CORRELATION,
    cudnnDataType_t as DataType,
};

use super::{
    descriptor::{Descriptor, Note},
    functions::{Functions, Handle},
};
use crate::{ALIGNMENT, Convolution, Element, Wanted, convolution::strides};

/// The most memory that a convolution may use besides its tensors.
const WORKSPACE: i64 = 1 << 30;

/// The most engines that are asked about.
const ENGINES: usize = 64;

/// The most notes that an engine has. There are ten kinds in cuDNN 9.28.
const NOTES: usize = 64;

/// What engines may not do: add up in less than f32, and compute something else when they are asked again.
const UNWANTED: [Note; 2] = [
    Note(CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION as u32),
    Note(CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC as u32),
];

/// Where a plan is for.
pub(super) enum Target {
    /// The device of a handle.
    Handle(Handle),
    /// A device that is only described, which need not be there.
    #[cfg(test)]
    Described(Descriptor),
}

impl Target {
    fn tell_graph(&self, graph: &Descriptor) -> Result<(), String> {
        match self {
            Self::Handle(handle) => {
                graph.set_handle(Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, *handle)
            }
            #[cfg(test)]
            Self::Described(_) => Ok(()),
        }
    }

    /// The heuristics have a handle by their graph.
    #[cfg_attr(not(test), expect(unused_variables, reason = "a device is told"))]
    fn tell_heuristic(&self, heuristic: &Descriptor) -> Result<(), String> {
        match self {
            Self::Handle(_) => Ok(()),
            #[cfg(test)]
            Self::Described(device) => {
                heuristic.set_part(Name::CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, device)
            }
        }
    }

    fn tell_plan(&self, plan: &Descriptor) -> Result<(), String> {
        match self {
            Self::Handle(handle) => {
                plan.set_handle(Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, *handle)
            }
            #[cfg(test)]
            Self::Described(device) => {
                plan.set_part(Name::CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, device)
            }
        }
    }
}

/// How a convolution is computed.
pub(super) struct Plan {
    pub(super) plan: Descriptor,
    /// The bytes that it uses besides its tensors.
    pub(super) workspace: usize,
    /// What the plan is made of.
    _parts: Vec<Descriptor>,
}

impl Plan {
    /// The ids of the tensors that are read and of the one that is computed, in the order of [`Convolution::shapes`].
    pub(super) const IDS: [i64; 3] = [1, 2, 3];

    /// The first plan that the heuristics advise and that can be had. If there is none, why.
    pub(super) fn new(
        functions: &'static Functions,
        target: &Target,
        convolution: &Convolution,
    ) -> Result<Self, String> {
        let mut parts = operation(functions, convolution)?;
        let graph = Descriptor::new(functions, Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
        let operation = parts
            .last()
            .expect("the operation is the last of its parts");
        graph.set_part(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, operation)?;
        target.tell_graph(&graph)?;
        let graph = graph.finalized()?;
        let mut why = "it knows no engine".to_string();
        for mode in [Mode::CUDNN_HEUR_MODE_A, Mode::CUDNN_HEUR_MODE_FALLBACK] {
            let (heuristic, engines) = match advised(functions, target, &graph, mode) {
                Ok(advised) => advised,
                Err(problem) => {
                    why = problem;
                    continue;
                }
            };
            for engine in engines {
                match planned(functions, target, &engine) {
                    Ok((plan, workspace)) => {
                        parts.extend([graph, heuristic, engine]);
                        return Ok(Self {
                            plan,
                            workspace,
                            _parts: parts,
                        });
                    }
                    Err(problem) => why = problem,
                }
            }
        }
        Err(why)
    }
}

/// The engines that the heuristics advise, the best first, and the heuristics.
fn advised(
    functions: &'static Functions,
    target: &Target,
    graph: &Descriptor,
    mode: Mode,
) -> Result<(Descriptor, Vec<Descriptor>), String> {
    let heuristic = Descriptor::new(functions, Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
    heuristic.set_part(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph)?;
    let (name, kind) = (Name::CUDNN_ATTR_ENGINEHEUR_MODE, Type::CUDNN_TYPE_HEUR_MODE);
    heuristic.set_choice(name, kind, mode as u32)?;
    target.tell_heuristic(&heuristic)?;
    let heuristic = heuristic.finalized()?;
    let engine = |_| Descriptor::new(functions, Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    let engines: Result<Vec<_>, _> = (0..ENGINES).map(engine).collect();
    let engines = heuristic.get_parts(Name::CUDNN_ATTR_ENGINEHEUR_RESULTS, engines?)?;
    Ok((heuristic, engines))
}

/// The plan of an engine, and its workspace in bytes.
fn planned(
    functions: &'static Functions,
    target: &Target,
    config: &Descriptor,
) -> Result<(Descriptor, usize), String> {
    let engine = Descriptor::new(functions, Kind::CUDNN_BACKEND_ENGINE_DESCRIPTOR)?;
    let engines = config.get_parts(Name::CUDNN_ATTR_ENGINECFG_ENGINE, vec![engine])?;
    for engine in &engines {
        let notes = engine.get::<Note>(Name::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, NOTES)?;
        if UNWANTED.iter().any(|unwanted| notes.contains(unwanted)) {
            return Err("its engines add up in 16 bits, or in no fixed order".into());
        }
    }
    let plan = Descriptor::new(functions, Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
    plan.set_part(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config)?;
    target.tell_plan(&plan)?;
    let plan = plan.finalized()?;
    let sizes = plan.get::<i64>(Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, 1)?;
    match sizes.first() {
        Some(&size) if (0..=WORKSPACE).contains(&size) => Ok((plan, size as usize)),
        _ => Err(format!(
            "its engines use {sizes:?} bytes besides the tensors"
        )),
    }
}

/// The operation, with its parts before it.
fn operation(
    functions: &'static Functions,
    convolution: &Convolution,
) -> Result<Vec<Descriptor>, String> {
    let element = match convolution.element {
        Element::BF16 => DataType::CUDNN_DATA_BFLOAT16,
        Element::F16 => DataType::CUDNN_DATA_HALF,
    };
    let mut parts = vec![window(functions, convolution)?];
    for (shape, id) in convolution.shapes().iter().zip(Plan::IDS) {
        parts.push(tensor(functions, shape, element, id)?);
    }
    let [conv, a, b, output] = &parts[..] else {
        unreachable!("a convolution has three tensors");
    };
    let (kind, names) = match convolution.wanted {
        Wanted::Output => (
            Kind::CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
            [
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
            ],
        ),
        Wanted::InputGradient => (
            Kind::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
            [
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
            ],
        ),
        Wanted::WeightGradient => (
            Kind::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
            [
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
            ],
        ),
    };
    let operation = Descriptor::new(functions, kind)?;
    let [tensors @ .., alpha, beta] = names;
    for (name, part) in tensors.into_iter().zip([conv, a, b, output]) {
        operation.set_part(name, part)?;
    }
    operation.set(alpha, &[1f32])?;
    operation.set(beta, &[0f32])?;
    parts.push(operation.finalized()?);
    Ok(parts)
}

fn tensor(
    functions: &'static Functions,
    shape: &[usize],
    element: DataType,
    id: i64,
) -> Result<Descriptor, String> {
    let tensor = Descriptor::new(functions, Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?;
    let (name, kind) = (
        Name::CUDNN_ATTR_TENSOR_DATA_TYPE,
        Type::CUDNN_TYPE_DATA_TYPE,
    );
    tensor.set_choice(name, kind, element as u32)?;
    tensor.set(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, &wide(shape))?;
    tensor.set(Name::CUDNN_ATTR_TENSOR_STRIDES, &wide(&strides(shape)))?;
    tensor.set(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, &[id])?;
    tensor.set(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[ALIGNMENT as i64])?;
    tensor.finalized()
}

/// Where a convolution's windows are, with sums in f32.
fn window(functions: &'static Functions, of: &Convolution) -> Result<Descriptor, String> {
    let window = Descriptor::new(functions, Kind::CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR)?;
    let (name, kind) = (
        Name::CUDNN_ATTR_CONVOLUTION_COMP_TYPE,
        Type::CUDNN_TYPE_DATA_TYPE,
    );
    window.set_choice(name, kind, DataType::CUDNN_DATA_FLOAT as u32)?;
    let (name, kind) = (
        Name::CUDNN_ATTR_CONVOLUTION_CONV_MODE,
        Type::CUDNN_TYPE_CONVOLUTION_MODE,
    );
    window.set_choice(name, kind, CUDNN_CROSS_CORRELATION as u32)?;
    let dims = of.stride.len() as i64;
    window.set(Name::CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, &[dims])?;
    let [before, after] = [|it: &(usize, usize)| it.0, |it: &(usize, usize)| it.1]
        .map(|side| of.padding.iter().map(side).collect::<Vec<_>>());
    for (name, sizes) in [
        (Name::CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, &of.stride),
        (Name::CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, &before),
        (Name::CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, &after),
        (Name::CUDNN_ATTR_CONVOLUTION_DILATIONS, &of.dilation),
    ] {
        window.set(name, &wide(sizes))?;
    }
    window.finalized()
}

fn wide(sizes: &[usize]) -> Vec<i64> {
    sizes.iter().map(|&size| size as i64).collect()
}

#[cfg(test)]
mod tests;
