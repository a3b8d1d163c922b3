//! A policy as it is serialized and printed for debugging: what differs from the table of rules.

use super::{Policy, Rule};
use burn::tensor::FloatDType;
use burn_layer::Op;
use core::fmt;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A policy in its serialized form, with the rules that differ from the table.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PolicyRecord {
    name: String,
    #[serde(default = "enabled")]
    enabled: bool,
    low: FloatDType,
    #[serde(default)]
    low_outputs: bool,
    #[serde(default)]
    rules: BTreeMap<String, Rule>,
}

fn enabled() -> bool {
    true
}

impl From<Policy> for PolicyRecord {
    fn from(policy: Policy) -> Self {
        // By name, in the order in which the rules will be read: an op comes before its backward, which gets the op's rule unless
        // it has another.
        let mut ops: Vec<Op> = Op::ALL.to_vec();
        ops.sort_by_key(|op| op.name());
        let mut read = Policy::builder(policy.low);
        let mut rules = BTreeMap::new();
        for op in ops {
            if let Some(rule) = policy.rule(op)
                && read.policy.rule(op) != Some(rule)
            {
                read = read.rule(op, rule);
                rules.insert(String::from(op.name()), rule);
            }
        }
        Self {
            rules,
            name: policy.name,
            enabled: policy.enabled,
            low: policy.low,
            low_outputs: policy.low_outputs,
        }
    }
}

/// Lists the rules that differ from the table alone. [`Display`](fmt::Display) prints all of them.
impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let record = PolicyRecord::from(self.clone());
        f.debug_struct("Policy")
            .field("name", &record.name)
            .field("enabled", &record.enabled)
            .field("low", &record.low)
            .field("low_outputs", &record.low_outputs)
            .field("rules", &record.rules)
            .finish()
    }
}

impl TryFrom<PolicyRecord> for Policy {
    type Error = PolicyError;

    fn try_from(record: PolicyRecord) -> Result<Self, PolicyError> {
        let mut policy = Policy::builder(record.low)
            .name(record.name)
            .low_outputs(record.low_outputs);
        for (name, rule) in record.rules {
            let op = Op::from_name(&name).filter(|op| op.takes_float());
            policy = policy.rule(op.ok_or(PolicyError::UnknownOp { name })?, rule);
        }
        let mut policy = policy.build();
        policy.enabled = record.enabled;
        Ok(policy)
    }
}

/// Why a serialized policy could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// The policy has a rule for something that is no float op of Burn.
    #[error(
        "the policy has a rule for `{name}`, which is no op of Burn that takes a float tensor; `Op::ALL` lists the ops"
    )]
    UnknownOp {
        /// The name in the serialized policy.
        name: String,
    },
}
