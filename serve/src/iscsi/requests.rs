//! Requests that are no SCSI commands: NOP, text, logout, task management. All but task management
//! are answered at once.
//!
//! Task management takes effect on commands that no disk works on yet: they are forgotten, and
//! their data are dropped. The others are finished and answered first. So after the answer nothing
//! of the commands is outstanding, which is what the initiator asked for.

use super::{
    login::negotiate,
    state::{Iscsi, Managing, Pdu, Phase},
};
use crate::net::{connection::Connection, core::Core, peer::Peer, protocol::SessionEnd};
use diskwright_iscsi::{
    scsi::unit_of,
    wire::{NO_TAG, Opcode, RejectReason, TaskFunction, TaskReply, replies, text},
};
use std::sync::Arc;

impl Core<Iscsi> {
    pub(super) fn take_request(
        &mut self,
        conn: &mut Connection<Iscsi>,
        opcode: Opcode,
        pdu: &Pdu,
        data: Vec<u8>,
    ) -> Result<(), SessionEnd> {
        conn.requests += 1;
        match opcode {
            // It wants no answer.
            Opcode::NopOut if pdu.header.tag == NO_TAG => {}
            Opcode::NopOut => {
                let keep = data.len().min(conn.session.agreed.segment_bytes);
                let counters = conn.session.next_counters();
                let header = replies::nop_in(pdu.header.tag, pdu.header.lun, NO_TAG, counters, keep);
                self.put_response(conn, &header, &data[..keep]);
            }
            Opcode::Text => self.take_text(conn, pdu, &data),
            Opcode::TaskManagement => self.manage(conn, pdu),
            Opcode::Logout => {
                let counters = conn.session.next_counters();
                self.put_response(conn, &replies::outcome(Opcode::LogoutResponse, pdu.header.tag, 0, counters), &[]);
                return Err(SessionEnd::Disconnected);
            }
            _ => self.reject(conn, RejectReason::NotSupported, &pdu.bytes),
        }
        Ok(())
    }

    fn take_text(&mut self, conn: &mut Connection<Iscsi>, pdu: &Pdu, data: &[u8]) {
        let continues = pdu.bytes[1] & 0x40 != 0;
        let Ok(pairs) = text::pairs(data).collect::<Result<Vec<_>, _>>() else {
            return self.reject(conn, RejectReason::Protocol, &pdu.bytes);
        };
        if continues {
            return self.reject(conn, RejectReason::NotSupported, &pdu.bytes);
        }
        let is_discovery = matches!(conn.session.phase, Phase::Full { is_discovery: true, .. });
        let mut answer = Vec::new();
        for (name, value) in pairs {
            match name {
                "SendTargets" => {
                    let wants_all = value == "All" && is_discovery;
                    // In a normal session, no value means the target of the session.
                    let wants_this = value == self.shared.target || value.is_empty() && !is_discovery;
                    if wants_all || wants_this {
                        text::put(&mut answer, "TargetName", &self.shared.target);
                        if let Peer::Tcp { local, .. } = &conn.peer {
                            text::put(&mut answer, "TargetAddress", &format!("{local},1"));
                        }
                    } else if value == "All" {
                        text::put(&mut answer, name, "Reject");
                    }
                }
                "MaxRecvDataSegmentLength" | "InitiatorAlias" => {
                    negotiate(conn, is_discovery, name, value, &mut answer);
                }
                _ => text::put(&mut answer, name, "NotUnderstood"),
            }
        }
        let counters = conn.session.next_counters();
        let header = replies::text_reply(pdu.header.tag, None, counters, answer.len());
        self.put_response(conn, &header, &answer);
    }

    fn manage(&mut self, conn: &mut Connection<Iscsi>, pdu: &Pdu) {
        let (function, of_tag) = TaskFunction::decode(&pdu.bytes);
        let unit = unit_of(pdu.header.lun).map(usize::from).filter(|&unit| self.exports.here(unit).is_some());
        let of_unit = |lun: u64| unit.is_some() && unit_of(lun).map(usize::from) == unit;
        let session = &conn.session;
        let select = |wanted: &dyn Fn(u32, u64) -> bool| -> Vec<u32> {
            let is_it = |&slot: &u32| session.tasks.get(slot).is_some_and(|task| wanted(task.tag, task.lun));
            session.tasks.indices().filter(is_it).collect()
        };
        let (tasks, reply) = match function {
            TaskFunction::AbortTask => {
                let found = select(&|tag, _| tag == of_tag);
                let reply = if found.is_empty() { TaskReply::NoTask } else { TaskReply::Complete };
                (found, reply)
            }
            TaskFunction::AbortTaskSet | TaskFunction::ClearTaskSet | TaskFunction::LogicalUnitReset
                if unit.is_none() =>
            {
                (Vec::new(), TaskReply::NoLun)
            }
            TaskFunction::AbortTaskSet | TaskFunction::ClearTaskSet | TaskFunction::LogicalUnitReset => {
                (select(&|_, lun| of_unit(lun)), TaskReply::Complete)
            }
            TaskFunction::TargetWarmReset | TaskFunction::TargetColdReset => {
                (select(&|_, _| true), TaskReply::Complete)
            }
            TaskFunction::TaskReassign => (Vec::new(), TaskReply::NoReassign),
            TaskFunction::ClearAca | TaskFunction::Other(_) => (Vec::new(), TaskReply::NotSupported),
        };
        tracing::debug!(peer = %conn.peer, ?function, tasks = tasks.len(), "task management");
        match (function, unit) {
            (TaskFunction::LogicalUnitReset, Some(unit)) => conn.session.units.reset(unit),
            (TaskFunction::TargetWarmReset | TaskFunction::TargetColdReset, _) => {
                let exports = Arc::clone(&self.exports);
                (0..exports.indexes()).for_each(|unit| conn.session.units.reset(unit));
            }
            _ => {}
        }
        let is_one = function == TaskFunction::AbortTask;
        let left = self.forget_tasks(conn, &tasks);
        // A single command that was answered after all does not exist any more.
        let reply = if is_one && !left.is_empty() { TaskReply::NoTask } else { reply };
        conn.session.managing.push(Managing { tag: pdu.header.tag, outcome: reply as u8, tasks: left });
        self.task_ended(conn, NO_TAG);
    }

    /// Forgets those of the tasks that no disk works on. Returns the others. No data are half
    /// received when a request is taken, so there is no third kind.
    fn forget_tasks(&mut self, conn: &mut Connection<Iscsi>, tasks: &[u32]) -> Vec<u32> {
        let mut left = Vec::new();
        for &slot in tasks {
            let session = &mut conn.session;
            let waits = session.waiting.contains(&slot);
            session.waiting.retain(|&waiting| waiting != slot);
            let Some(task) = session.tasks.get_mut(slot) else { continue };
            match task.parked.take() {
                _ if waits => drop(session.tasks.remove(slot)),
                Some(incoming) => {
                    session.tasks.remove(slot);
                    conn.forget(incoming, &mut self.pool);
                }
                None => left.push(slot),
            }
        }
        left
    }
}
