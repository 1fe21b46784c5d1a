//! Admin commands: identify, log pages, features, event requests. All are answered at once.
//!
//! Hosts are told when namespaces come, go or change their size. They have event requests
//! outstanding for that. A notice is sent once; the next one when the host has read the log page of
//! changed namespaces.

use super::{
    controller::{ENTRIES_MAX, QUEUES_MAX},
    namespaces,
    state::{Admin, CAPSULE_DATA_BYTES, Nvme, TRANSFER_EXPONENT, VERSION},
};
use crate::{
    net::{
        connection::{Connection, Incoming, Input},
        core::Core,
        exports::Exports,
        outbox::Share,
        peer::Peer,
    },
    reservations::{Change, Seat},
};
use diskwright_nvme::wire::{
    Command, Completion, DISCOVERY_NQN, PAGE_BYTES, Sgl, Status, admin, command::feature, fabrics, identify, log, nvm,
    reservation,
};
use std::sync::atomic::Ordering::Relaxed;
use uuid::Uuid;

/// The admin commands that are supported.
const COMMANDS: [u8; 8] = [
    admin::GET_LOG_PAGE,
    admin::IDENTIFY,
    admin::ABORT,
    admin::SET_FEATURES,
    admin::GET_FEATURES,
    admin::ASYNC_EVENT,
    admin::KEEP_ALIVE,
    fabrics::OPCODE,
];

/// The I/O commands that are supported, and those of them that change data.
const IO_COMMANDS: [u8; 11] = [
    nvm::FLUSH,
    nvm::WRITE,
    nvm::READ,
    nvm::COMPARE,
    nvm::WRITE_ZEROES,
    nvm::DATASET_MANAGEMENT,
    nvm::VERIFY,
    reservation::REGISTER,
    reservation::REPORT,
    reservation::ACQUIRE,
    reservation::RELEASE,
];
const CHANGING: [u8; 3] = [nvm::WRITE, nvm::WRITE_ZEROES, nvm::DATASET_MANAGEMENT];

/// Notices about reservations that wait at most. Further ones are lost, as their number tells.
const RESERVATION_NOTICES_MAX: usize = 64;

/// The notices that can be masked: the feature's bits.
const RESERVATION_NOTICES_ALL: u32 = 0b1110;

impl Core<Nvme> {
    pub(super) fn admin_command(&mut self, conn: &mut Connection<Nvme>, command: &Command, data: &[u8]) {
        let answer = match command.opcode {
            admin::IDENTIFY => self.identify(conn, command).map(Answer::Page),
            admin::GET_LOG_PAGE => self.log_page(conn, command).map(Answer::Page),
            admin::GET_FEATURES => get_feature(conn, command).map(Answer::Result),
            admin::SET_FEATURES => set_feature(conn, command, data).map(Answer::Result),
            admin::KEEP_ALIVE => Ok(Answer::Result(0)),
            // Nothing is aborted: bit 0 of the result says so.
            admin::ABORT => Ok(Answer::Result(1)),
            admin::ASYNC_EVENT => match self.take_event_request(conn, command.cid) {
                None => return,
                Some(status) => Err(status),
            },
            _ => Err(Status::INVALID_OPCODE),
        };
        // Answers that the host does not read count in its share.
        let share = Share::of(if let Ok(Answer::Page(page)) = &answer { page.len() } else { 0 });
        conn.share.add(share);
        conn.outbox.count(share);
        match answer {
            Ok(Answer::Page(page)) => self.put_page(conn, command.cid, &page),
            Ok(Answer::Result(result)) => {
                let done = Completion { result, cid: command.cid, ..Completion::default() };
                self.complete_with(conn, done);
            }
            Err(status) => self.complete(conn, command.cid, status),
        }
    }

    fn identify(&mut self, conn: &mut Connection<Nvme>, command: &Command) -> Result<Vec<u8>, Status> {
        check_transport(command, PAGE_BYTES)?;
        let Some(queue) = conn.session.queue_mut() else { return Err(Status::SEQUENCE) };
        let controller = &queue.controller;
        let exports = &self.exports;
        let subsystem = &self.shared.subsystem;
        let page = match command.cdw[0] as u8 {
            identify::CONTROLLER => {
                let id = Uuid::new_v5(&Uuid::NAMESPACE_OID, subsystem.as_bytes()).simple().to_string();
                identify::Controller {
                    serial: id[..20].to_owned(),
                    model: "Diskwright".to_owned(),
                    firmware: env!("CARGO_PKG_VERSION").to_owned(),
                    id: controller.id,
                    version: VERSION,
                    transfer_exponent: TRANSFER_EXPONENT,
                    is_discovery: controller.is_discovery,
                    keep_alive_granularity: 10,
                    queue_entries: ENTRIES_MAX,
                    namespaces: if controller.is_discovery { 0 } else { NAMESPACES_MAX },
                    optional_commands: if controller.is_discovery { 0 } else { identify::Controller::COMMANDS },
                    subsystem: if controller.is_discovery { DISCOVERY_NQN.to_owned() } else { subsystem.clone() },
                    capsule_units: ((Command::BYTES + CAPSULE_DATA_BYTES) / 16) as u32,
                }
                .encode()
            }
            _ if controller.is_discovery => return Err(Status::INVALID_FIELD),
            identify::ACTIVE_NAMESPACES => {
                if let Some(admin) = &mut queue.admin {
                    admin.known = Some(known(exports, subsystem));
                }
                identify::active_namespaces(namespaces::ids(exports), command.nsid)
            }
            identify::NAMESPACE => match namespaces::export_of(exports, command.nsid) {
                Some((_, export)) => {
                    let can_last = self.reservations.of(&export.name).can_last();
                    namespaces::describe(subsystem, export, can_last).encode()
                }
                // A namespace that is not active: all zeros.
                None if (1..=NAMESPACES_MAX).contains(&command.nsid) => return Ok(vec![0; PAGE_BYTES]),
                None => return Err(Status::INVALID_NAMESPACE),
            },
            identify::DESCRIPTORS => match namespaces::export_of(exports, command.nsid) {
                Some((_, export)) => identify::descriptors(namespaces::uuid_of(subsystem, export).into_bytes()),
                None => return Err(Status::INVALID_NAMESPACE),
            },
            _ => return Err(Status::INVALID_FIELD),
        };
        Ok(page.to_vec())
    }

    fn log_page(&mut self, conn: &mut Connection<Nvme>, command: &Command) -> Result<Vec<u8>, Status> {
        let [select, upper, offset_low, offset_high, ..] = command.cdw;
        let dwords = u64::from(select >> 16) | u64::from(upper & 0xffff) << 16;
        let len_bytes = usize::try_from((dwords + 1) * 4).map_err(|_| Status::INVALID_FIELD)?;
        if len_bytes > 4096 << TRANSFER_EXPONENT {
            return Err(Status::INVALID_FIELD);
        }
        check_transport(command, len_bytes)?;
        let peer = &conn.peer;
        let local = if let Peer::Tcp { local, .. } = peer { Some(*local) } else { None };
        let Some(queue) = conn.session.queue_mut() else { return Err(Status::SEQUENCE) };
        let retains = select & 1 << 15 != 0;
        let page = match (select as u8, queue.controller.is_discovery) {
            (log::ERRORS, _) => log::errors(),
            (log::DISCOVERY, true) => {
                let entry = |address| {
                    let subsystem = self.shared.subsystem.clone();
                    log::DiscoveryEntry { address, subsystem, is_discovery: false }
                };
                log::discovery(1, &local.map(entry).into_iter().collect::<Vec<_>>())
            }
            (log::HEALTH, false) => log::health(),
            (log::FIRMWARE, false) => log::firmware(env!("CARGO_PKG_VERSION")),
            (log::EFFECTS, false) => log::effects(&COMMANDS, &IO_COMMANDS, &CHANGING),
            (log::CHANGED_NAMESPACES, false) => match &mut queue.admin {
                Some(admin) => {
                    let page = log::changed_namespaces(&admin.changed);
                    if !retains {
                        admin.changed.clear();
                        admin.told = false;
                    }
                    page
                }
                None => return Err(Status::INVALID_LOG_PAGE),
            },
            (log::ACCESS_STATES, false) => {
                let ids: Vec<u32> = namespaces::ids(&self.exports).collect();
                log::access_states(&ids, select & 1 << 8 == 0, NAMESPACES_MAX)
            }
            (log::RESERVATIONS, false) => match &mut queue.admin {
                Some(admin) => admin.take_reservation_notice(retains),
                None => return Err(Status::INVALID_LOG_PAGE),
            },
            _ => return Err(Status::INVALID_LOG_PAGE),
        };
        let offset_bytes = u64::from(offset_low) | u64::from(offset_high) << 32;
        let from = usize::try_from(offset_bytes).ok().filter(|&from| from <= page.len() && from.is_multiple_of(4));
        let mut rest = page[from.ok_or(Status::INVALID_FIELD)?..].to_vec();
        rest.resize(len_bytes, 0);
        Ok(rest)
    }

    /// Keeps an event request. Returns the status of one that is refused.
    fn take_event_request(&mut self, conn: &mut Connection<Nvme>, cid: u16) -> Option<Status> {
        let admin = conn.session.queue_mut().and_then(|queue| queue.admin.as_mut())?;
        if admin.events.len() > usize::from(identify::Controller::EVENT_REQUESTS) {
            return Some(Status::EVENT_LIMIT);
        }
        admin.events.push(cid);
        self.notify(conn);
        None
    }

    /// Compares the namespaces with what the host knows of them.
    pub(super) fn look_for_changes(&mut self, conn: &mut Connection<Nvme>) {
        let Some(admin) = conn.session.queue_mut().and_then(|queue| queue.admin.as_mut()) else { return };
        let Some(before) = &mut admin.known else { return };
        let now = known(&self.exports, &self.shared.subsystem);
        if *before == now {
            return;
        }
        let differs = |these: &[(u32, u64, Uuid)], those: &[(u32, u64, Uuid)]| {
            these.iter().filter(|one| !those.contains(one)).map(|&(id, ..)| id).collect::<Vec<_>>()
        };
        admin.changed.extend(differs(before, &now).into_iter().chain(differs(&now, before)));
        admin.changed.sort_unstable();
        admin.changed.dedup();
        *before = now;
        self.notify(conn);
    }

    /// Keeps what other hosts have done to the reservations of this one.
    pub(super) fn look_for_notices(&mut self, conn: &mut Connection<Nvme>) {
        let notices = conn.session.seats.take_notices();
        let Some(admin) = conn.session.queue_mut().and_then(|queue| queue.admin.as_mut()) else { return };
        for (kind, nsid) in notices {
            if admin.masked.get(&nsid).is_some_and(|mask| mask & kind.mask() != 0) {
                continue;
            }
            admin.reservation_notices_total = admin.reservation_notices_total.wrapping_add(1).max(1);
            if admin.reservation_notices.len() < RESERVATION_NOTICES_MAX {
                admin.reservation_notices.push_back((kind, nsid));
            }
        }
        self.notify(conn);
    }

    /// Completes an event request for each thing that is to be told.
    fn notify(&mut self, conn: &mut Connection<Nvme>) {
        while let Some(admin) = conn.session.queue_mut().and_then(|queue| queue.admin.as_mut())
            && let Some((result, cid)) = admin.next_event()
        {
            self.complete_with(conn, Completion { result, cid, ..Completion::default() });
        }
    }

    /// Commands for a namespace that is leaving are not carried out any more: neither those that
    /// wait, nor writes whose data have not all come.
    pub(super) fn forget_leaving(&mut self, conn: &mut Connection<Nvme>) {
        let exports = std::sync::Arc::clone(&self.exports);
        let is_leaving = |nsid: u32| (nsid as usize).checked_sub(1).is_some_and(|index| exports.is_leaving(index));
        let mut gone = Vec::new();
        conn.session.waiting.retain(|command| {
            let stays = !is_leaving(command.nsid);
            if !stays {
                gone.push(command.cid);
            }
            stays
        });
        for cid in gone {
            conn.session.commands -= 1;
            self.complete(conn, cid, Status::INVALID_NAMESPACE);
        }
        let refuse = |incoming: &mut Incoming<_>| {
            incoming.is_refused |= exports.is_leaving(incoming.asked.export as usize);
        };
        if let Input::Payload(incoming) = &mut conn.input {
            refuse(incoming);
        }
        let session = &mut conn.session;
        session.checking.iter_mut().for_each(refuse);
        for slot in session.parked.indices().collect::<Vec<_>>() {
            session.parked.get_mut(slot).into_iter().flatten().for_each(refuse);
        }
    }
}

/// The largest NSID. Indexes of exports are reused, so it is never reached.
const NAMESPACES_MAX: u32 = 1024;

enum Answer {
    Page(Vec<u8>),
    Result(u64),
}

fn known(exports: &Exports, subsystem: &str) -> Vec<(u32, u64, Uuid)> {
    namespaces::ids(exports)
        .filter_map(|id| namespaces::export_of(exports, id).map(|(_, export)| (id, export)))
        .map(|(id, export)| {
            let described = namespaces::describe(subsystem, export, false);
            (id, described.blocks, Uuid::from_bytes(described.guid))
        })
        .collect()
}

/// Checks that the host has room for the data of a command, and takes them in PDUs.
pub(super) fn check_transport(command: &Command, len_bytes: usize) -> Result<(), Status> {
    match command.sgl {
        Sgl { kind: Sgl::TRANSPORT, len_bytes: room_bytes, .. } if room_bytes as usize >= len_bytes => Ok(()),
        Sgl { kind: Sgl::TRANSPORT, .. } => Err(Status::SGL_LENGTH),
        _ => Err(Status::SGL_TYPE),
    }
}

fn get_feature(conn: &mut Connection<Nvme>, command: &Command) -> Result<u64, Status> {
    let Some(queue) = conn.session.queue() else { return Err(Status::SEQUENCE) };
    match (command.cdw[0] as u8, queue.controller.is_discovery) {
        (feature::KEEP_ALIVE, _) => Ok(queue.controller.keep_alive_ms.load(Relaxed).into()),
        (feature::ASYNC_EVENTS, _) => Ok(queue.admin.as_ref().map_or(0, |admin| admin.notices.into())),
        (feature::WRITE_CACHE, false) => Ok(1),
        (feature::QUEUES, false) => Ok(queues_granted(u32::MAX)),
        (feature::RESERVATION_NOTICES, false) => {
            let masked = |admin: &Admin| admin.masked.get(&command.nsid).copied().unwrap_or(0);
            Ok(queue.admin.as_deref().map_or(0, masked).into())
        }
        (feature::RESERVATION_PERSISTENCE, false) => {
            let seat = seat_of(conn, command.nsid)?;
            Ok(seat.reservations().state().lasts().into())
        }
        (feature::ARBITRATION | feature::POWER_MANAGEMENT | feature::ERROR_RECOVERY, false) => Ok(0),
        _ => Err(Status::INVALID_FIELD),
    }
}

fn set_feature(conn: &mut Connection<Nvme>, command: &Command, data: &[u8]) -> Result<u64, Status> {
    let Some(queue) = conn.session.queue_mut() else { return Err(Status::SEQUENCE) };
    let [id, value, ..] = command.cdw;
    match (id as u8, queue.controller.is_discovery) {
        (feature::KEEP_ALIVE, _) => {
            queue.controller.keep_alive_ms.store(value, Relaxed);
            Ok(0)
        }
        (feature::ASYNC_EVENTS, _) => {
            if let Some(admin) = &mut queue.admin {
                admin.notices = value;
            }
            Ok(0)
        }
        (feature::RESERVATION_NOTICES, false) if value & !RESERVATION_NOTICES_ALL == 0 => {
            let all = conn.session.seats.ids();
            let ids: Vec<u32> = all.into_iter().filter(|id| [*id, u32::MAX].contains(&command.nsid)).collect();
            if ids.is_empty() {
                return Err(Status::INVALID_NAMESPACE);
            }
            if let Some(admin) = conn.session.queue_mut().and_then(|queue| queue.admin.as_mut()) {
                admin.masked.extend(ids.into_iter().map(|id| (id, value)));
            }
            Ok(0)
        }
        (feature::RESERVATION_PERSISTENCE, false) => {
            let seat = seat_of(conn, command.nsid)?;
            let lasts = value & 1 != 0;
            if lasts && !seat.reservations().can_last() {
                return Err(Status::INVALID_FIELD);
            }
            seat.change(&Change::Outlast(lasts)).map(|()| 0).map_err(|_| Status::INTERNAL)
        }
        (feature::QUEUES, false) if value as u16 != u16::MAX && value >> 16 != 0xffff => Ok(queues_granted(value)),
        // The host id is that of Connect, and cannot be changed in fabrics.
        (feature::HOST_ID, false) if data == queue.controller.host_id => Ok(0),
        (feature::ARBITRATION | feature::ERROR_RECOVERY, false) => Ok(0),
        _ => Err(Status::INVALID_FIELD),
    }
}

/// The host's seat at a namespace.
fn seat_of(conn: &mut Connection<Nvme>, nsid: u32) -> Result<&mut Seat, Status> {
    let seat = (nsid as usize).checked_sub(1).and_then(|index| conn.session.seats.at(index));
    seat.ok_or(Status::INVALID_NAMESPACE)
}

/// The number of queues, less one, in both directions: as many as asked for, up to a limit.
fn queues_granted(asked: u32) -> u64 {
    let granted = u64::from((asked as u16).min((asked >> 16) as u16).min(QUEUES_MAX - 1));
    granted | granted << 16
}
